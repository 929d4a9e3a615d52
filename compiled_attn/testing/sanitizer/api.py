"""`kv_sanitizer`: checks an engine, a cache, or foreign kernels for a while."""

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
    """Context in which every read and write of a paged KV cache is checked.

    Each slot of each layer has a tag that says which tokens are there. The call that writes keys
    writes tags, and the call that reads keys compares them, also inside of captured graphs, with
    what the host knows of the requests. The null block 0 is for padding. Freed blocks become NaN.

    - An `Engine` before its warmup: each step is checked, and one that corrupts the cache raises
      `CorruptCache` and is rolled back. Steps are not scheduled ahead. After the context an engine
      that was warmed up inside serves on, unchecked, from the same graphs.
    - A `PagedKVCache`, for `UnifiedAttention` and own models: call ``step([StepTokens(...)])``
      before the calls of a step, ``free(blocks)`` for freed ones, and ``check()``, as the next step
      and the end of the context do.
    - Tensors of each layer, for foreign kernels: also ``wrap(kernel)``, and call what it returns.

    Args:
        watched: what is checked.
        sizes: of a cache or tensors: the most requests and tokens of a step, padding included, and
            blocks of a request (default: all); of tensors also ``block_size`` and, if axis 0 is
            slots, ``num_blocks``.

    Raises:
        CorruptCache: something read or wrote a wrong slot; from the step, `check`, or the end.
        ValueError: a warm engine, one that is checked already, tensors that share memory.
        ConfigError: an engine of several ranks.
        TypeError: none of these.
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
        tensors.check()
        return
    if watched.shadow is not None:
        raise ValueError(
            "expected a cache that nothing checks, got one in a sanitizer: leave one of them out"
        )
    cache = CacheWatch(watched, **given)
    try:
        yield cache
        cache.check()
    finally:
        watched.cast(None)
