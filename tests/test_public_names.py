"""Every public name can be imported from the packages and modules that list it."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

import compiled_attn
import graphs


@pytest.mark.parametrize("package", [compiled_attn, graphs], ids=lambda package: package.__name__)
def test_every_name_in_all_exists(package):
    found = [f"{package.__name__}.{each.name}" for each in pkgutil.iter_modules(package.__path__)]
    for name in [package.__name__, *found]:
        try:
            module = importlib.import_module(name)
        except ImportError as error:  # of an extra that is not installed
            assert error.name and error.name.split(".")[0] not in ("compiled_attn", "graphs")
            continue
        missing = [each for each in getattr(module, "__all__", ()) if not hasattr(module, each)]
        assert not missing, f"{name}.__all__ lists {missing}"
