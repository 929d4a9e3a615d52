"""A call of unified attention: argument checks, cache writes, and the call of the op.

A compiled or captured graph must not read numbers: `BatchBuilder` has checked them on the host.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_attn.arguments import FLOATS, INTS, Expect, can_read, slot_used_twice
from compiled_attn.attention.metadata import UnifiedMetadata
from compiled_attn.attention.scoring import Scoring, check_window
from compiled_attn.cache.kv_cache import write_slots
from compiled_attn.cache.quantisation import QUANTISED
from compiled_attn.ops import AttentionTraits, NewTokens, PagedCall, unit_strides

__all__ = ["UnifiedCall", "check"]


class UnifiedCall(NamedTuple):
    """Arguments of `unified_attention`, under the same names."""

    query: Tensor
    key: Tensor
    value: Tensor | None
    key_cache: Tensor
    value_cache: Tensor | None
    metadata: UnifiedMetadata
    scoring: Scoring
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None
    value_projection: Tensor | None = None

    def traits(self) -> AttentionTraits:
        """Returns what decides which kernel can serve the call."""
        values = self.key_cache if self.value_cache is None else self.value_cache
        scoring, metadata = self.scoring, self.metadata
        tensors = *self[:-1], scoring.alibi_slopes, scoring.sinks  # the projection comes later
        return AttentionTraits(
            self.query.device.type,
            self.query.dtype,
            (self.key_cache.dtype, values.dtype),
            self.query.shape[-1],
            softcap=scoring.softcap is not None,
            alibi=0 if scoring.alibi_slopes is None else 1,
            gradients=torch.is_grad_enabled()
            and any(isinstance(each, Tensor) and each.requires_grad for each in tensors),
            by_request=metadata.by_request is not None,
            by_parts=metadata.has_parts,
            unit_stride=unit_strides(self.key_cache, values),
        )

    def write_tokens(self) -> tuple[Tensor, Tensor]:
        """Writes keys and values to the caches; returns them as later steps will read them, in the
        dtype of the caches or dequantised to float32.
        """
        slots = self.metadata.slot_mapping
        key = write_slots(self.key_cache, self.key, slots, self.key_scale)
        if self.value is None or self.value_cache is None:  # part of the keys, written with them
            return key, key[..., : self._latent()]
        return key, write_slots(self.value_cache, self.value, slots, self.value_scale)

    def paged(self, new: NewTokens | None) -> PagedCall:
        """Returns the call of the op, over the caches block by block.

        A step that has only parts has no requests.
        """
        metadata = self.metadata
        value_cache, value_scale = self.value_cache, self.value_scale
        if value_cache is None:
            value_cache, value_scale = self.key_cache[..., : self._latent()], self.key_scale
        none = metadata.slot_mapping[:0]

        def blocks(slots: Tensor) -> Tensor:
            by_block: Tensor = slots.unflatten(0, (-1, metadata.block_size))
            return by_block

        return PagedCall(
            self.query,
            blocks(self.key_cache),
            blocks(value_cache),
            *(metadata.by_request or (none.unsqueeze(0), none, none)),
            self.scoring,
            key_scale=None if self.key_scale is None else blocks(self.key_scale),
            value_scale=None if value_scale is None else blocks(value_scale),
            new=new,
            segment=metadata.segment,
        )

    def _latent(self) -> int | None:
        """Elements of a key that are its value if there are no values; None: all."""
        return None if self.value_projection is None else self.value_projection.shape[1]


_expect = Expect(
    ValueError,
    TypeError,
    remedy="build the metadata and the tensors of a step with the same bucket",
)


def check(call: UnifiedCall) -> None:
    """Raises ValueError or TypeError unless the arguments of `unified_attention` fit together."""
    query, key, m = call.query, call.key, call.metadata
    _expect.tensor("query", query, "[T, H, D]", (None, None, None), FLOATS)
    tokens, heads, dim = query.shape
    _expect.tensor("key", key, "[T, Hk, D]", (tokens, None, dim), (query.dtype,), query)
    _expect.heads(heads, key.shape[1])
    _check_cache("key", call.key_cache, call.key_scale, key, m.block_size)
    _check_values(call)
    _check_scoring(call.scoring, query)
    if call.value_projection is not None:
        _check_projection(call.value_projection, query, call.value)
    _check_parts(m)
    _check_shapes(m, tokens, heads, query)
    _check_positions(m, call.scoring, query)
    if m.ranks is not None:
        _check_ranks(m, call.scoring)
    if can_read(query):
        # First, since numbers that are written over after they were checked can be anything.
        names = ("key_cache", "value_cache", "key_scale", "value_scale")
        read = {"query": query, "key": key, "value": call.value, **vars(m)}
        _expect.apart({name: getattr(call, name) for name in names}, read)
        if query.device.type == "cpu":  # on another device each layer would wait for them
            _check_numbers(m, tokens, call.key_cache.shape[0])


def _check_cache(
    name: str, cache: Tensor, scale: Tensor | None, new: Tensor, block_size: int
) -> None:
    legend = "[num_blocks * block_size, Hk, D]"
    shape = (None, *new.shape[1:])
    _expect.tensor(f"{name}_cache", cache, legend, shape, FLOATS + QUANTISED, new)
    slots = cache.shape[0]
    if block_size < 1 or slots % block_size:
        expected = f"{name}_cache of a multiple of block_size {block_size} slots"
        _expect(False, expected, slots, "the metadata was built for another cache")
    if (cache.dtype in QUANTISED) != (scale is not None):
        expected = f"{name}_scale with a cache of {QUANTISED} and with no other"
        got = f"{name}_scale {_given(scale)} with {cache.dtype}"
        _expect(False, expected, got, "pass PagedKVCache's caches and scales together")
    if scale is not None:
        shape = (slots, new.shape[1])
        _expect.tensor(f"{name}_scale", scale, "[slots, Hk]", shape, (torch.float32,), new)


def _check_values(call: UnifiedCall) -> None:
    query, value, cache, scale = call.query, call.value, call.value_cache, call.value_scale
    if (value is None) != (cache is None):
        expected = "value and value_cache both (a cache with V) or neither (latents, without V)"
        got = f"value {_given(value)} and value_cache {_given(cache)}"
        _expect(False, expected, got, "pass the other too")
    if value is None or cache is None:
        got, remedy = _given(scale), "latents have key_scale"
        _expect(scale is None, "value_scale only with value_cache", got, remedy)
        return
    shape = (query.shape[0], call.key.shape[1], None)
    _expect.tensor("value", value, "[T, Hk, Dv]", shape, (query.dtype,), query)
    _check_cache("value", cache, scale, value, call.metadata.block_size)
    both = cache.shape[0], call.key_cache.shape[0]
    remedy = "make both caches with the same number of blocks"
    _expect(both[0] == both[1], "as many value slots as key slots", both, remedy)


def _check_scoring(scoring: Scoring, query: Tensor) -> None:
    for name, vector in (("alibi_slopes", scoring.alibi_slopes), ("sinks", scoring.sinks)):
        if vector is not None:
            _expect.tensor(name, vector, "[H]", query.shape[1:2], like=query)
    _expect.number("scale", scoring.scale, "D ** -0.5 is the usual one")
    for name, number in (("softcap", scoring.softcap), ("sliding_window", scoring.window)):
        if number is not None:
            _expect.number(name, number, "None is none")
    positive = scoring.softcap is None or scoring.softcap > 0
    _expect(positive, "softcap of a positive number", scoring.softcap, "None is no softcap")
    if scoring.window is not None:
        check_window(scoring.window)


def _check_projection(projection: Tensor, query: Tensor, value: Tensor | None) -> None:
    legend = "[H, R, Dv], R at most a value's size,"
    _expect.tensor("value_projection", projection, legend, (None, None, None))
    size = min(projection.shape[1], query.shape[2]) if value is None else value.shape[-1]
    shape = (query.shape[1], size, None)
    _expect.tensor("value_projection", projection, legend, shape, like=query)


def _check_parts(m: UnifiedMetadata) -> None:
    parts = {
        "causal": ("causal_bias",),
        "shared": ("shared_blocks", "shared_bias"),
        "unique": ("unique_blocks", "unique_block_mapping", "unique_bias"),
    }
    for name, fields in parts.items():
        given = sum(getattr(m, field) is not None for field in fields)
        expected = f"all fields of the {name} part or none of them"
        remedy = "blocks without a bias would be left out in silence"
        _expect(given in (0, len(fields)), expected, given, remedy)
    given = sum(field is not None for field in (m.block_tables, m.seq_lens, m.query_start_loc))
    expected = "block_tables, seq_lens and query_start_loc together or none of them"
    _expect(given in (0, 3), expected, f"{given} of them", "fill all three, or none")
    remedy = "give the step a causal bias, shared blocks or unique blocks"
    has_any = m.has_parts or m.by_request is not None
    _expect(has_any, "at least one part of the attention", "none", remedy)
    for name, size in (("causal_width", m.causal_width), ("shared_chunk", m.shared_chunk)):
        fits = size is None or size >= 1
        _expect(fits, f"{name} of at least 1 or None", size, "None is one piece")


def _check_shapes(m: UnifiedMetadata, tokens: int, heads: int, like: Tensor) -> None:
    shape: tuple[int, ...]
    ints: dict[str, tuple[int | None, ...]] = {"slot_mapping": (tokens,)}
    if m.causal_bias is not None:
        _expect_bias("causal_bias", m.causal_bias, (tokens, tokens), heads, like)
    if m.shared_blocks is not None and m.shared_bias is not None:
        blocks = m.shared_blocks.numel()
        ints["shared_blocks"] = ints["shared_lengths"] = (blocks,)
        if m.shared_bias.is_floating_point():
            shape = (tokens, blocks, m.block_size)
            _expect_bias("shared_bias", m.shared_bias, shape, heads, like)
        else:
            shape = (tokens, blocks)
            _expect.tensor("shared_bias", m.shared_bias, "(usages)", shape, INTS, like)
    if m.unique_blocks is not None and m.unique_bias is not None:
        listed = m.unique_blocks
        unique = listed if isinstance(listed, int) else listed.numel()
        between = (heads,) if m.unique_bias.dim() == 3 else ()
        shape = (unique, *between, m.block_size)
        ints["unique_blocks"] = ints["unique_block_mapping"] = (unique,)
        ints["unique_queries"] = (None,)
        _expect.tensor("unique_bias", m.unique_bias, "", shape, FLOATS, like)
    if m.by_request is not None:
        requests = m.by_request[0].shape[0]
        ints["block_tables"], ints["seq_lens"] = (requests, None), (requests,)
        ints["query_start_loc"] = (requests + 1,)
    _expect_ints(m, ints, like)


def _check_ranks(m: UnifiedMetadata, scoring: Scoring) -> None:
    # No rank knows the positions of its keys.
    remedy = "keys on several ranks are found by block tables"
    _expect(m.by_request is not None, "ranks with a step request by request", "none", remedy)
    remedy = "attention that depends on positions needs all keys on one rank"
    _expect(scoring.window is None, "ranks without a sliding window", scoring.window, remedy)
    _expect(scoring.alibi_slopes is None, "ranks without ALiBi", "slopes", remedy)


def _check_positions(m: UnifiedMetadata, scoring: Scoring, like: Tensor) -> None:
    if (scoring.window is None and scoring.alibi_slopes is None) or not m.has_parts:
        return
    needed = {"positions": like.shape[:1]}
    blocks_of = {"shared_starts": m.shared_blocks, "unique_starts": m.unique_block_mapping}
    for name, blocks in blocks_of.items():
        if blocks is not None and blocks.shape[0]:
            needed[name] = blocks.shape
    _expect_ints(m, needed, like)
    for name in needed:
        m.needs(getattr(m, name), name)


def _expect_ints(
    m: UnifiedMetadata, shapes: Mapping[str, Sequence[int | None]], like: Tensor
) -> None:
    for name, shape in shapes.items():
        if isinstance(field := getattr(m, name), Tensor):
            _expect.tensor(name, field, "", shape, INTS, like)


def _expect_bias(name: str, bias: Tensor, shape: tuple[int, ...], heads: int, like: Tensor) -> None:
    between = (heads,) if bias.dim() == len(shape) + 1 else ()
    _expect.tensor(name, bias, "(0 shows a key, -inf hides it)", (*between, *shape), FLOATS, like)


def _given(tensor: Tensor | None) -> str:
    return "not given" if tensor is None else "given"


def _check_numbers(m: UnifiedMetadata, tokens: int, slots: int) -> None:
    blocks = slots // m.block_size
    _expect_range("slot_mapping", m.slot_mapping, slots)
    if m.shared_blocks is not None:
        _expect_range("shared_blocks", m.shared_blocks, blocks)
    if isinstance(m.unique_blocks, Tensor):
        _expect_range("unique_blocks", m.unique_blocks, blocks)
    elif m.unique_blocks is not None:
        expected, remedy = f"unique_blocks of at most {blocks}", "use metadata of this cache"
        _expect(0 <= m.unique_blocks <= blocks, expected, m.unique_blocks, remedy)
    if m.unique_block_mapping is not None:
        # Padding points at row 0, also in a step without rows.
        _expect_range("unique_block_mapping", m.unique_block_mapping, max(tokens, 1))
    _check_queries(m)
    _check_overlap(m)


def _check_queries(m: UnifiedMetadata) -> None:
    mapping, bias = m.unique_block_mapping, m.unique_bias
    if m.unique_queries is None or mapping is None or bias is None:
        return
    reading = mapping[(bias > -math.inf).flatten(1).any(1)]
    listed = m.unique_queries[m.unique_queries >= 0]
    if not torch.isin(reading, listed).all() or listed.unique().numel() != listed.numel():
        raise ValueError(
            "unique_queries: expected every row of unique_block_mapping in it once, got "
            f"{m.unique_queries.tolist()}: a row that is left out would lose its blocks, one that "
            "is listed twice would count them twice"
        )


def _check_overlap(m: UnifiedMetadata) -> None:
    # The null block is where padding writes, all of it to the same slots.
    slot = slot_used_twice(m.slot_mapping[m.slot_mapping >= m.block_size])
    if slot is not None:
        raise ValueError(
            f"slot_mapping: expected a slot of its own for every new token, got slot {slot} twice: "
            "requests that share a block must copy it before they write to it"
        )


def _expect_range(name: str, ids: Tensor, limit: int) -> None:
    if not ids.numel():
        return
    low, high = (int(end) for end in torch.aminmax(ids))
    if low < 0 or high >= limit:
        raise ValueError(
            f"{name}: expected numbers in 0..{limit - 1}, got {low}..{high}: "
            "check the block tables; padding points at 0"
        )
