"""Errors of the package; each message says what was expected, what came, and what helps."""

from __future__ import annotations

__all__ = [
    "FlashArgumentError",
    "KernelArgumentError",
    "NativeUnavailable",
    "PagedArgumentError",
]


class FlashArgumentError(RuntimeError, ValueError):
    """A call of `flash_attn_with_kvcache` that cannot be served; the cache is as it was.

    A `RuntimeError` because FlashAttention 2 raises that, and a `ValueError` because that is what
    it is.
    """


class KernelArgumentError(RuntimeError, ValueError):
    """Arguments of an op that do not fit together, or that its kernel cannot serve; nothing was
    read or written.

    C++ can only raise ``RuntimeError``: catch that where either may serve.
    """


class NativeUnavailable(RuntimeError):
    """The native kernel cannot be built or loaded here; the message says why, and what helps."""


class PagedArgumentError(RuntimeError, ValueError):
    """Arguments of paged attention that cannot be served; outputs and caches are as they were.

    A `RuntimeError` because the known kernels raise that, and a `ValueError` because that is what
    it is.
    """
