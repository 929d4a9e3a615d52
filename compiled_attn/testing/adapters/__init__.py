"""Paged attention kernels of other projects behind signatures that the conformance kit knows.

Each module imports its package when it is called, so that all of them can be imported anywhere::

    python -m compiled_attn.testing compiled_attn.testing.adapters.flex:flash_attn_with_kvcache

Their ``CAPABILITIES`` are what the documentation of the kernel claims, not what it passes.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

__all__ = ["AdapterUnavailable", "package"]


class AdapterUnavailable(ImportError):
    """The package of an adapter is not installed here, or cannot be imported."""


def package(name: str, install: str) -> ModuleType:
    """Returns an imported module of a foreign package.

    Args:
        name: of the module.
        install: what to do without it, such as "pip install flash-attn".

    Raises:
        AdapterUnavailable: it cannot be imported; one line with the reason.
    """
    try:
        return import_module(name)
    except (ImportError, OSError, RuntimeError) as error:  # torchvision raises RuntimeError
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise AdapterUnavailable(f"expected a module {name}, got {reason!r}: {install}") from error
