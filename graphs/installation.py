"""The install command for error messages."""

from __future__ import annotations

import shlex
from pathlib import Path

__all__ = ["install_command"]

# A release to PyPI sets this to True.
_PUBLISHED: bool = False


def install_command(*extras: str) -> str:
    """The command that installs the project with extras, such as ``pip install '.[cli]'``."""
    suffix = f"[{','.join(extras)}]" if extras else ""
    if _PUBLISHED:
        return f"pip install {shlex.quote(f'compiled-attn{suffix}')}"
    checkout = Path(__file__).resolve().parents[1]
    if (checkout / "pyproject.toml").is_file():  # this code runs from it: stay editable
        return f"pip install -e {shlex.quote(f'{checkout}{suffix}')}"
    return f"pip install {shlex.quote(f'.{suffix}')} (in a checkout of compiled-attn)"
