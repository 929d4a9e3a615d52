"""A copy of the kernels that a test may change."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOM = Path(__file__).parents[4] / "compiled_attn" / "ops" / "triton"


@pytest.fixture
def of_this_triton() -> None:
    """Skips where instructions and registers are those of an older compiler."""
    import triton

    if triton.__version__.startswith(("3.5", "3.6", "3.7", "3.8")):
        pytest.skip(f"its figures are those of Triton 3.9, not of {triton.__version__}")


@pytest.fixture
def room(tmp_path, monkeypatch) -> Iterator[Path]:
    """A copy of the kernels' folder that can be imported, by another name."""
    copy = tmp_path / f"mutant_{tmp_path.name}"
    shutil.copytree(ROOM, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for path in copy.glob("*.py"):
        path.write_text(path.read_text().replace("compiled_attn.ops.triton", copy.name))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield copy
    for name in [name for name in sys.modules if name.split(".")[0] == copy.name]:
        del sys.modules[name]
