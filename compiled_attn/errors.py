"""Errors of this package; messages say expected, got, remedy."""

from __future__ import annotations

from collections.abc import Hashable

__all__ = [
    "AdapterError",
    "ConfigError",
    "DemandFileError",
    "DuplicateRequest",
    "EngineStopped",
    "EngineUnsupported",
    "FlashArgumentError",
    "KernelArgumentError",
    "ModelChanged",
    "ModelError",
    "ModelRefused",
    "NativeUnavailable",
    "OutOfBlocks",
    "PagedArgumentError",
    "QueueFull",
    "RankLost",
    "RanksDisagree",
    "RequestCancelled",
    "RequestFailed",
    "TraceError",
    "UnknownRequest",
]


class AdapterError(ValueError):
    """A LoRA adapter cannot be served, or does not fit the model."""


class ConfigError(ValueError):
    """A setting or request cannot work."""


class DemandFileError(ValueError):
    """A demand file that cannot be read; the message begins with `path:line:`."""


class DuplicateRequest(ValueError):
    """A request of this id is already in the pool."""

    def __init__(self, request_id: Hashable) -> None:
        super().__init__(request_id)
        self.request_id = request_id

    def __str__(self) -> str:
        return (
            f"expected a new request id, got {self.request_id!r}, which owns blocks: free it first"
        )


class EngineStopped(RuntimeError):
    """An `AsyncEngine` does not serve any more; the cause is the error that stopped it."""


class EngineUnsupported(RuntimeError):
    """An integration does not support another project's engine, or one of its settings."""


class FlashArgumentError(RuntimeError, ValueError):
    """Arguments of `flash_attn_with_kvcache` are not supported; the cache is unchanged.

    Also a `RuntimeError`, which FlashAttention 2 raises.
    """


class KernelArgumentError(RuntimeError, ValueError):
    """Arguments of an op do not fit together, or its kernel does not support them; nothing was
    written.

    In a compiled or captured graph C++ can only raise ``RuntimeError``.
    """


class ModelChanged(RuntimeError):
    """A served model has changed since the warmup."""


class ModelError(ValueError):
    """A model cannot be loaded."""


class ModelRefused(ValueError):
    """A model does not run on the paged cache, or computes something else there."""


class NativeUnavailable(RuntimeError):
    """The native kernel cannot be built or loaded."""


class OutOfBlocks(RuntimeError):
    """A request needs more blocks than are free or evictable; nothing was allocated.

    Attributes:
        request_id: the request.
        length: the positions it needs.
        needed: the blocks that it lacks.
        free: free blocks without content.
        cached: free blocks with cached content, which can be evicted.
        total: blocks of the pool, without the null block.
    """

    def __init__(
        self, request_id: Hashable, length: int, needed: int, free: int, cached: int, total: int
    ) -> None:
        super().__init__(request_id, length, needed, free, cached, total)
        self.request_id, self.length, self.needed = request_id, length, needed
        self.free, self.cached, self.total = free, cached, total

    def __str__(self) -> str:
        return (
            f"request {self.request_id!r} needs {self.needed} more blocks to hold {self.length} "
            f"tokens, got {self.free + self.cached} of {self.total} ({self.free} free + "
            f"{self.cached} cached): preempt or free a request, or make the pool larger"
        )


class PagedArgumentError(RuntimeError, ValueError):
    """Arguments of paged attention are not supported; outputs and caches are unchanged.

    Also a `RuntimeError`, which other kernels raise.
    """


class QueueFull(RuntimeError):
    """Too many requests wait; the submitted one was not queued."""


class RankLost(RuntimeError):
    """Another rank does not answer any more."""


class RanksDisagree(RuntimeError):
    """A rank is about to compute another step than rank 0."""


class RequestCancelled(RuntimeError):
    """A request was cancelled before it finished."""


class RequestFailed(RuntimeError):
    """A request finished with an error, such as logits that are not finite."""


class TraceError(ValueError):
    """A trace cannot be read; the message names file, line and reason."""


class UnknownRequest(KeyError):
    """No request of this id owns blocks: it was never added, or was freed or preempted."""

    def __init__(self, request_id: Hashable) -> None:
        super().__init__(request_id)
        self.request_id = request_id

    def __str__(self) -> str:
        return (
            f"expected a request of this pool, got {self.request_id!r}, which was never added "
            "or is already freed or preempted: add it first"
        )
