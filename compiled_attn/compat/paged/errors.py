"""The one error of this package, and the one-line form of its message."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["PagedArgumentError", "expect"]


class PagedArgumentError(RuntimeError, ValueError):
    """Arguments that cannot be served; outputs and caches are as they were.

    A `RuntimeError` because the known kernels raise that, and a `ValueError` because that is what
    it is.
    """


def expect(ok: bool, what: str, got: Any, remedy: str) -> None:
    """Raises `PagedArgumentError` unless ``ok``."""
    if not ok:
        shown = list(got) if isinstance(got, torch.Size) else got
        raise PagedArgumentError(f"expected {what}, got {shown}: {remedy}")
