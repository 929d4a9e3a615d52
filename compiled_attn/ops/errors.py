"""What the native ops refuse, and why they may not be there."""

from __future__ import annotations

__all__ = ["KernelArgumentError", "NativeUnavailable"]


class KernelArgumentError(RuntimeError, ValueError):
    """Arguments of an op that do not fit together; nothing was read or written.

    C++ can only raise ``RuntimeError``: catch that where either may serve.
    """


class NativeUnavailable(RuntimeError):
    """The native kernel cannot be built or loaded here; the message says why, and what helps."""
