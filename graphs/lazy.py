"""Package attributes that are imported on first access (PEP 562)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

__all__ = ["is_lazy", "lazy_names"]

_lazy: dict[str, dict[str, str]] = {}


def lazy_names(
    package: str, modules: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` for a package that imports its modules on first access.

    Args:
        package: ``__name__`` of the package.
        modules: names by module of the package, separated by spaces.
    """
    module_of = {name: module for module, names in modules.items() for name in names.split()}
    _lazy[package] = module_of

    def import_name(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = getattr(import_module(f"{package}.{module_of[name]}"), name)
        setattr(sys.modules[package], name, found)
        return found

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *module_of})

    return import_name, names


def is_lazy(package: str, name: str, value: Any) -> bool:
    """Whether a global of a package is what it imports on first access, and nothing else."""
    module = _lazy.get(package, {}).get(name)
    return module is not None and value is getattr(
        sys.modules.get(f"{package}.{module}"), name, None
    )
