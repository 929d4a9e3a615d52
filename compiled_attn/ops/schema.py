"""The schemas of the ops, parsed from the C++ sources."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["SOURCES", "schemas"]

SOURCES = Path(__file__).parent / "cpu" / "csrc"
"""Folder of the C++ sources."""

_SCHEMA = re.compile(r'R"schema\((.*?)\)schema"', re.DOTALL)


def schemas() -> dict[str, str]:
    """Returns the schema of each op by name, for `torch.library` where there is no C++."""
    texts = (" ".join(text.split()) for text in _SCHEMA.findall((SOURCES / "schema.h").read_text()))
    return {text.partition("(")[0]: text for text in texts}
