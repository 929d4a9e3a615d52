"""Checks that `import graphs` finds the package of this distribution.

The name is common: a folder of the user's project, or PyPI's package `graphs`. This module does not
import `graphs`, so that users can still import another one.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

__all__ = ["foreign_graphs", "refuse_foreign_graphs"]

# A line of our graphs/__init__.py. The path does not suffice: pip installs PyPI's `graphs` and ours
# into the same folder, and the later __init__.py wins.
_OURS = "from graphs.lazy import lazy_names"


def foreign_graphs() -> str | None:
    """Returns the path of another `graphs` that would be imported instead of ours, or None."""
    loaded = sys.modules.get("graphs")
    if loaded is None:
        spec = find_spec("graphs")
        if spec is None:  # an import will report that it is missing
            return None
    else:
        spec = getattr(loaded, "__spec__", None)
    return None if spec is not None and _is_ours(spec) else _path(spec)


def refuse_foreign_graphs() -> None:
    """Checks before an import of `graphs`.

    Raises:
        ImportError: another package or module of that name comes first.
    """
    if (path := foreign_graphs()) is not None:
        raise ImportError(shadowed(path), name="graphs", path=path)


def shadowed(path: str) -> str:
    """Describes a foreign `graphs` at ``path``, and the remedy."""
    return (
        f"compiled_attn needs its own package 'graphs', but 'graphs' is {path}: rename that one, "
        "start Python where it is not on sys.path, or, if it is PyPI's package 'graphs', "
        "`pip uninstall graphs` and install compiled-attn again"
    )


def _is_ours(spec: ModuleSpec) -> bool:
    get_source = getattr(spec.loader, "get_source", None)
    try:
        if get_source is not None:
            source = get_source("graphs")
        else:  # pytest's loader, which rewrites asserts
            source = (
                Path(spec.origin).read_text("utf-8") if spec.has_location and spec.origin else ""
            )
    except (ImportError, OSError, SyntaxError, UnicodeDecodeError):
        return False
    return source is None or _OURS in source  # None: only compiled files, as in a frozen program


def _path(spec: ModuleSpec | None) -> str:
    if spec is None:
        return "a module without a file"
    folders = list(spec.submodule_search_locations or ())
    return spec.origin or (folders[0] if folders else "a module without a file")
