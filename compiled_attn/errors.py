"""Errors that a user of this package can meet; each says expected, got, remedy."""

from __future__ import annotations

from collections.abc import Hashable

__all__ = [
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


class ConfigError(ValueError):
    """A setting or a request that cannot work: the message says expected, got, remedy."""


class DemandFileError(ValueError):
    """A demand file that cannot be read; the message begins with `path:line:`."""


class DuplicateRequest(ValueError):
    """A request of this id is already in the pool."""

    def __init__(self, request_id: Hashable) -> None:
        super().__init__(request_id)
        self.request_id = request_id

    def __str__(self) -> str:
        return (
            f"expected a new request id, got {self.request_id!r}, which holds blocks: free it first"
        )


class EngineStopped(RuntimeError):
    """An engine in a thread of its own does not serve any more; its cause is why it failed."""


class EngineUnsupported(RuntimeError):
    """Another project's engine, or something that it asks for, that an integration cannot serve."""


class FlashArgumentError(RuntimeError, ValueError):
    """A call of `flash_attn_with_kvcache` that cannot be served; the cache is as it was.

    A `RuntimeError` because FlashAttention 2 raises that, and a `ValueError` because that is what
    it is.
    """


class KernelArgumentError(RuntimeError, ValueError):
    """Arguments of an op that do not fit together, or that its kernel cannot serve; nothing was
    read or written.

    In a compiled or captured graph C++ can only raise ``RuntimeError``: catch that where either
    may serve.
    """


class ModelChanged(RuntimeError):
    """A served model is not as it was at warmup: the message says what changed, and the remedy."""


class ModelError(ValueError):
    """A model that cannot be loaded; the message names the directory, the reason and the remedy."""


class ModelRefused(ValueError):
    """A model that would not run on the paged cache, or compute something else there."""


class NativeUnavailable(RuntimeError):
    """The native kernel cannot be built or loaded here; the message says why, and what helps."""


class OutOfBlocks(RuntimeError):
    """A request asked for more blocks than are free or evictable; nothing was allocated.

    Attributes:
        request_id: the request that asked.
        length: the positions it wanted to hold.
        needed: the blocks that were missing.
        free: free blocks without content.
        cached: blocks that no request holds, whose content is kept until they are evicted.
        total: blocks of the pool, without the null block.
    """

    def __init__(
        self, request_id: Hashable, length: int, needed: int, free: int, cached: int, total: int
    ) -> None:
        super().__init__(request_id, length, needed, free, cached, total)
        self.request_id = request_id
        self.length = length
        self.needed = needed
        self.free = free
        self.cached = cached
        self.total = total

    def __str__(self) -> str:
        return (
            f"request {self.request_id!r} needs {self.needed} more blocks to hold {self.length} "
            f"tokens, got {self.free + self.cached} of {self.total} ({self.free} free + "
            f"{self.cached} cached): preempt or free a request, or make the pool larger"
        )


class PagedArgumentError(RuntimeError, ValueError):
    """Arguments of paged attention that cannot be served; outputs and caches are as they were.

    A `RuntimeError` because the known kernels raise that, and a `ValueError` because that is what
    it is.
    """


class QueueFull(RuntimeError):
    """Too many requests wait; the one that was submitted is not among them."""


class RankLost(RuntimeError):
    """A rank that computes the model too does not answer any more."""


class RanksDisagree(RuntimeError):
    """A rank computed another step than rank 0."""


class RequestCancelled(RuntimeError):
    """A request was cancelled before its end."""


class RequestFailed(RuntimeError):
    """A request ended with an error, such as one whose logits are not finite."""


class TraceError(ValueError):
    """A trace that cannot be read; the message names file, line and reason."""


class UnknownRequest(KeyError):
    """No request of this id holds blocks: it was never added, or was freed or preempted before."""

    def __init__(self, request_id: Hashable) -> None:
        super().__init__(request_id)
        self.request_id = request_id

    def __str__(self) -> str:
        return (
            f"expected a request of this pool, got {self.request_id!r}, which was never added "
            "or is already freed or preempted: add it first"
        )
