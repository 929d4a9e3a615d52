"""`kv_sanitizer`: checks an engine, a cache, or other kernels inside a context."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, overload

from torch import Tensor

from compiled_attn.cache.kv_cache import PagedKVCache
from compiled_attn.testing.sanitizer.caches import CacheWatch, TensorWatch

if TYPE_CHECKING:
    from compiled_attn.engine.engine import Engine
    from compiled_attn.engine.watched import StepWatch

__all__ = ["kv_sanitizer"]


@overload
def kv_sanitizer(watched: Engine) -> contextlib.AbstractContextManager[StepWatch]: ...
@overload
def kv_sanitizer(
    watched: PagedKVCache,
    *,
    max_requests: int = 64,
    max_tokens: int = 2048,
    max_blocks: int | None = None,
) -> contextlib.AbstractContextManager[CacheWatch]: ...
@overload
def kv_sanitizer(
    watched: Sequence[Tensor | Sequence[Tensor]],
    *,
    block_size: int,
    num_blocks: int | None = None,
    max_requests: int = 64,
    max_tokens: int = 2048,
    max_blocks: int | None = None,
) -> contextlib.AbstractContextManager[TensorWatch]: ...
@contextlib.contextmanager
def kv_sanitizer(watched: Any, **sizes: Any) -> Iterator[Any]:
    """Checks every read and write of a paged KV cache inside a context.

    Each slot of each layer has a tag: a hash of the tokens in it. The call that writes keys writes
    tags, and the call that reads keys compares them with what the host knows of the requests, also
    in captured graphs. Block 0 is the null block, for padding. Freed blocks are filled with NaN.

    - An `Engine` before its warmup: a step that corrupts the cache raises `CorruptCache` and is
      rolled back. Async scheduling is off. After the context, an engine that was warmed up inside
      continues unchecked with the same graphs.
    - A `PagedKVCache`, for `UnifiedAttention` and own models: call ``step([StepTokens(...)])``
      before the calls of a step, and ``free(blocks)`` when blocks are freed. ``check()`` raises
      for the calls so far; the next ``step`` and the end of the context call it too.
    - The cache tensors of each layer, for other kernels: the same, and replace each kernel by
      ``wrap(kernel)``.

    Args:
        watched: the engine, cache or tensors to check.
        sizes: of a cache or tensors: ``max_requests`` and ``max_tokens`` of a step, padding
            included, and ``max_blocks`` of a request (default: all); of tensors also
            ``block_size`` and, if axis 0 is slots or there are less than 4 axes, ``num_blocks``.

    Raises:
        CorruptCache: a call read or wrote a wrong slot; from the step, `check`, or the end.
        ValueError: a warm engine, one that is already checked, or tensors that share memory or
            may not be blocks.
        ConfigError: an engine of several ranks.
        TypeError: ``watched`` is none of these.
    """
    if hasattr(watched, "executor"):
        from compiled_attn.engine.sanitized import sanitized  # needs the extra hf

        with sanitized(watched) as watch:
            yield watch
        return
    given: dict[str, Any] = {"max_requests": 64, "max_tokens": 2048, "max_blocks": None} | sizes
    if not isinstance(watched, PagedKVCache):
        if not isinstance(watched, Sequence) or isinstance(watched, str):
            raise TypeError(
                "expected an Engine, a PagedKVCache or the tensors of each layer, got "
                f"{type(watched).__name__}: of an LLM or AsyncEngine pass EngineConfig(sanitize="
                "True)"
            )
        tensors = TensorWatch(watched, **{"num_blocks": None} | given)
        yield tensors
        tensors.check(is_over=True)
        return
    if watched.shadow is not None:
        raise ValueError(
            "expected a cache without a sanitizer, got one in a sanitizer: leave one of them out"
        )
    if watched.near is not None:
        raise ValueError(
            "expected a cache whose layers have the same blocks, got one with near layers: check "
            "the engine that has it"
        )
    cache = CacheWatch(watched, **given)
    try:
        yield cache
        cache.check(is_over=True)
    finally:
        watched.set_shadow(None)
