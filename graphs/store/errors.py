"""What a store refuses."""

from __future__ import annotations

__all__ = ["StoreBusy", "StoreError", "UnsafeStore"]


class StoreError(RuntimeError):
    """A store that cannot be used: what was expected, what was found, and the remedy."""


class UnsafeStore(StoreError):
    """Someone else can write to the store, so what it holds must not be run."""


class StoreBusy(StoreError):
    """Another process kept the store locked for longer than one waits."""
