"""Packages whose names are imported when they are first asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest

import compiled_attn
import compiled_attn.engine
import compiled_attn.text


@pytest.mark.parametrize("package", [compiled_attn, compiled_attn.engine, compiled_attn.text])
def test_every_public_name_is_listed_and_no_other_is_found(package):
    assert set(package.__all__) <= set(dir(package))
    with pytest.raises(AttributeError, match=f"'{package.__name__}' has no attribute 'Nothing'"):
        package.Nothing  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'Nothing'"):
        exec(f"from {package.__name__} import Nothing")


def test_importing_a_package_imports_none_of_its_names():
    code = "import compiled_attn.engine.config, sys; print({'torch', 'numpy'} & {*sys.modules})"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "set()"
