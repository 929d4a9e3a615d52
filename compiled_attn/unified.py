"""Unified attention: one call for a whole engine step, whatever mix of requests is in it.

New tokens are written to the paged cache, then three partial attentions (causal, shared, unique)
are taken and merged. After the unified attention of the Gaudi vLLM plugin; `UnifiedMetadata` keeps
its names.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from compiled_attn.cache import PagedKVCache
from compiled_attn.partial import (
    FEPS,
    FMIN,
    Attend,
    attend,
    lse,
    merge,
    partial_attn_causal,
    partial_attn_shared,
    partial_attn_sinks,
    partial_attn_unique,
    usage_bias,
)

__all__ = ["UnifiedAttention", "UnifiedMetadata", "unified_attention", "write_cache"]


@dataclass(frozen=True)
class UnifiedMetadata:
    """Which token may see what in one step; every tensor has the fixed shape of its bucket.

    Shape:
        - slot_mapping: ``[T]`` ints, cache slot of each new token; padding points into null block 0
        - causal_bias: ``[T, T]`` float or None, 0 where token i may see new token j, else -inf
        - shared_blocks: ``[S]`` ints or None, blocks that are compared with every query
        - shared_bias: ``[T, S, block_size]`` float, or usages ``[T, S]`` ints, or None
        - unique_blocks: ``[U]`` ints, or int U (the first U blocks of the cache), or None
        - unique_block_mapping: ``[U]`` ints, row of T that uses each unique block
        - unique_bias: ``[U, block_size]`` float or None

    Only features that depend on positions (`windowed`) need these:
        - positions: ``[T]`` ints, position of each token in its sequence
        - shared_starts: ``[S]`` ints, position of the first slot of each shared block
        - unique_starts: ``[U]`` ints, the same for the unique blocks

    Two spare work, and are derived or done without where they are None:
        - shared_lengths: ``[S]`` ints, leading slots of each shared block that any token sees
        - unique_queries: ``[Q]`` ints, rows that occur in ``unique_block_mapping``, padded with -1
    """

    block_size: int
    slot_mapping: Tensor
    causal_bias: Tensor | None = None
    causal_width: int | None = None
    shared_blocks: Tensor | None = None
    shared_bias: Tensor | None = None
    unique_blocks: Tensor | int | None = None
    unique_block_mapping: Tensor | None = None
    unique_bias: Tensor | None = None
    fmin: float = FMIN
    feps: float = FEPS
    positions: Tensor | None = None
    shared_starts: Tensor | None = None
    unique_starts: Tensor | None = None
    shared_lengths: Tensor | None = None
    unique_queries: Tensor | None = None

    @property
    def is_prompt(self) -> bool:
        """Whether the step has a causal part."""
        return self.causal_bias is not None

    @property
    def num_blocks(self) -> int:
        """Blocks that the step reads: shared and unique ones together, padding included."""
        unique = self.unique_blocks
        num_unique = unique if isinstance(unique, int) else _rows(unique)
        return _rows(self.shared_blocks) + num_unique

    @property
    def seq_len(self) -> int:
        """T if the step has a causal part, else 1."""
        return self.slot_mapping.shape[0] if self.is_prompt else 1

    def windowed(self, window: int) -> UnifiedMetadata:
        """The same step seen through a sliding window: a token sees itself and ``window - 1``
        before it.

        Raises:
            ValueError: the window is not positive, or the metadata carries no positions.
        """
        if window < 1:
            raise ValueError(f"expected a sliding window of at least 1 token, got {window}")
        positions = self._needs(self.positions, "positions")
        oldest = positions - (window - 1)  # [T], first position that each token sees
        causal, shared, unique = self.causal_bias, self.shared_bias, self.unique_bias
        if causal is not None:
            causal = _hide(causal, positions.unsqueeze(0) < oldest.unsqueeze(1))
        if shared is not None:
            starts = self._needs(self.shared_starts, "shared_starts")
            if not shared.is_floating_point():
                shared = usage_bias(shared, self.block_size)
            shared = _hide(shared, self._slots(starts) < oldest[:, None, None])
        if unique is not None:
            starts = self._needs(self.unique_starts, "unique_starts")
            mapping = self._needs(self.unique_block_mapping, "unique_block_mapping")
            unique = _hide(unique, self._slots(starts) < oldest[mapping].unsqueeze(-1))
        return replace(self, causal_bias=causal, shared_bias=shared, unique_bias=unique)

    def _slots(self, starts: Tensor) -> Tensor:
        return starts.unsqueeze(-1) + torch.arange(self.block_size, device=starts.device)

    @staticmethod
    def _needs(tensor: Tensor | None, name: str) -> Tensor:
        if tensor is None:
            raise ValueError(
                f"a sliding window needs metadata.{name}, got None: fill it, or use BatchBuilder"
            )
        return tensor


def unified_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    scale: float,
    metadata: UnifiedMetadata,
    *,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    attend: Attend = attend,
) -> Tensor | tuple[Tensor, Tensor]:
    """Writes this step's keys and values to the cache, then attends every token to all that it may
    see.

    Args:
        query: ``[T, H, D]``.
        key, value: ``[T, Hk, D]``, this step's tokens of all requests, flattened. ``H % Hk == 0``.
        key_cache, value_cache: flat slots ``[num_blocks * block_size, Hk, D]``; written in place at
            ``metadata.slot_mapping``, nowhere else.
        scale: factor of the scores, usually ``D ** -0.5``.
        metadata: who sees what.
        sliding_window: tokens that a token sees, itself included. None: all before it.
        softcap: cap c of ``c * tanh(score / c)``.
        sinks: ``[H]``, score of a head's attention sink.
        return_lse: also return the log-sum-exp ``[T, H]`` in float32, for merging across devices.
        attend: the kernel of the causal and shared parts, see `compiled_attn.kernels`.

    Returns:
        ``[T, H, D]`` in the query's dtype; a row that sees nothing is zero and has lse -inf.

    Raises:
        ValueError: shapes that do not fit together, or a step without any part.
    """
    _check(query, key, value, key_cache, value_cache, metadata)
    if sliding_window is not None:
        metadata = metadata.windowed(sliding_window)
    write_cache(key_cache, key, metadata.slot_mapping)
    if value_cache is not key_cache:
        write_cache(value_cache, value, metadata.slot_mapping)
    m = metadata
    causal = partial_attn_causal(
        query, key, value, m.causal_bias, m.causal_width, m.fmin,
        scale=scale, softcap=softcap, attend=attend,
    )  # fmt: skip
    shared = partial_attn_shared(
        query, key_cache, value_cache, m.shared_blocks, m.shared_bias, m.block_size, m.fmin,
        scale=scale, softcap=softcap, lengths=m.shared_lengths, attend=attend,
    )  # fmt: skip
    unique = partial_attn_unique(
        query, key_cache, value_cache, m.unique_blocks, m.unique_block_mapping, m.unique_bias,
        m.block_size, m.fmin, scale=scale, softcap=softcap, queries_used=m.unique_queries,
    )  # fmt: skip
    parts = [part for part in (causal, shared, unique) if part is not None]
    if parts and (sink := partial_attn_sinks(sinks, parts[0])) is not None:
        parts.append(sink)
    out = merge(*parts, feps=m.feps).to(query.dtype)
    return (out, lse(*parts).float()) if return_lse else out


class UnifiedAttention(nn.Module):
    """`unified_attention` as the attention of one layer over a `PagedKVCache`.

    Args:
        cache: the paged cache of the model.
        layer: index of this layer in the cache.
        scale, sliding_window, softcap, attend: as in `unified_attention`.
        sinks: ``[H]`` parameter or None.

    Shape:
        - forward(query ``[T, H, D]``, key ``[T, Hk, D]``, value ``[T, Hk, D]``, metadata) -> ``[T,
          H, D]``
    """

    def __init__(
        self,
        cache: PagedKVCache,
        layer: int = 0,
        *,
        scale: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: nn.Parameter | None = None,
        attend: Attend = attend,
    ) -> None:
        super().__init__()
        if not 0 <= layer < cache.num_layers:
            raise ValueError(f"expected a layer in 0..{cache.num_layers - 1}, got {layer}")
        self.cache = cache
        self.layer = layer
        self.scale = cache.head_dim**-0.5 if scale is None else scale
        self.sliding_window = sliding_window
        self.softcap = softcap
        self.sinks = sinks
        self.attend = attend

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, metadata: UnifiedMetadata
    ) -> Tensor:
        """Writes the step's keys and values, then attends: see `unified_attention`."""
        out = unified_attention(
            query,
            key,
            value,
            self.cache.key(self.layer),
            self.cache.value(self.layer),
            self.scale,
            metadata,
            sliding_window=self.sliding_window,
            softcap=self.softcap,
            sinks=self.sinks,
            attend=self.attend,
        )
        assert isinstance(out, Tensor)
        return out


def write_cache(cache: Tensor, new: Tensor, slot_mapping: Tensor) -> None:
    """Writes rows of ``new [T, Hk, D]`` to ``cache [slots, Hk, D]`` in place, at ``slot_mapping
    [T]``.

    ``index_copy_``: inside a captured graph it writes T rows and does not copy the cache.
    """
    cache.index_copy_(0, slot_mapping.long(), new.to(cache.dtype))


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    m: UnifiedMetadata,
) -> None:
    tokens, heads, dim = _shape(query, "query", "[T, H, D]")
    kv_heads = _shape(key, "key", "[T, Hk, D]")[1]
    if heads % kv_heads:
        raise ValueError(f"expected H to be a multiple of Hk, got H={heads}, Hk={kv_heads}")
    _expect("key", key, (tokens, kv_heads, dim))
    _expect("value", value, (tokens, kv_heads, value.shape[-1]))
    _expect("slot_mapping", m.slot_mapping, (tokens,))
    for name, cache, new in (("key_cache", key_cache, key), ("value_cache", value_cache, value)):
        slots = _shape(cache, name, "[num_blocks * block_size, Hk, D]")[0]
        _expect(name, cache, (slots, kv_heads, new.shape[-1]))
        if slots % m.block_size:
            raise ValueError(
                f"{name}: expected a multiple of block_size {m.block_size} slots, got {slots}: "
                "the metadata was built for another cache"
            )
    _check_parts(m)
    if m.causal_bias is not None:
        _expect("causal_bias", m.causal_bias, (*m.causal_bias.shape[:-2], tokens, tokens))
    if m.shared_blocks is not None and m.shared_bias is not None:
        blocks = m.shared_blocks.shape[0]
        tail = (tokens, blocks, m.block_size)
        shape = tail if m.shared_bias.is_floating_point() else tail[:2]
        _expect("shared_bias", m.shared_bias, (*m.shared_bias.shape[: -len(shape)], *shape))

    if isinstance(m.unique_blocks, Tensor) and m.unique_blocks.dim() != 1:
        raise ValueError(f"unique_blocks: expected [U], got {list(m.unique_blocks.shape)}")
    if m.unique_blocks is not None and m.unique_block_mapping is not None:
        unique = m.unique_blocks if isinstance(m.unique_blocks, int) else len(m.unique_blocks)
        _expect("unique_block_mapping", m.unique_block_mapping, (unique,))
        if m.unique_bias is not None:
            heads_between = tuple(m.unique_bias.shape[1:-1])
            _expect("unique_bias", m.unique_bias, (unique, *heads_between, m.block_size))


def _check_parts(m: UnifiedMetadata) -> None:
    parts: dict[str, list[Tensor | int | None]] = {
        "causal": [m.causal_bias],
        "shared": [m.shared_blocks, m.shared_bias],
        "unique": [m.unique_blocks, m.unique_block_mapping, m.unique_bias],
    }
    for name, fields in parts.items():
        given = sum(field is not None for field in fields)
        if 0 < given < len(fields):
            raise ValueError(
                f"expected all fields of the {name} part or none of them, got {given} of "
                f"{len(fields)}: blocks without a bias would be left out in silence"
            )
    if all(field is None for fields in parts.values() for field in fields):
        raise ValueError(
            "expected at least one part of the attention, got none: "
            "give the step a causal bias, shared blocks or unique blocks"
        )


def _shape(tensor: Tensor, name: str, legend: str) -> tuple[int, int, int]:
    if tensor.dim() != 3:
        raise ValueError(
            f"{name}: expected {legend}, got {tensor.dim()} axes: {list(tensor.shape)}"
        )
    return tensor.shape[0], tensor.shape[1], tensor.shape[2]


def _expect(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(
            f"{name}: expected shape {list(shape)}, got {list(tensor.shape)}: "
            "build the metadata and the tensors of a step with the same bucket"
        )


def _hide(bias: Tensor, hidden: Tensor) -> Tensor:
    return torch.where(hidden, -math.inf, bias)


def _rows(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.shape[0]
