"""The known signatures of paged attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from compiled_attn.testing import reference
from compiled_attn.testing.capabilities import FEATURES
from compiled_attn.testing.kit.interface import Arguments, Interface
from compiled_attn.testing.kit.step import QUANTISED, Step
from compiled_attn.testing.kit.unified import Unified

__all__ = ["INTERFACES", "Flash", "Op", "OpWrite", "PagedV1", "PagedV2", "Varlen", "VarlenPacked"]

_PAGED = frozenset({
    "shared_prefix", "padding_rows", "empty_rows", "strided", "int64_tables", "replay",
})  # fmt: skip
_COMMON = _PAGED | {"chunked", "window", "noncausal", "lse"}


def _sums(lse: Tensor) -> Tensor:
    """FlashAttention gives inf to a row that sees no key, where the reference gives -inf."""
    return lse.masked_fill(lse.isposinf(), -math.inf)


class Op(Interface):
    """The op ``compiled_attn::paged_attention``; see `compiled_attn.ops.reference`."""

    name = "op"
    features = frozenset(FEATURES) - {"append", "rotary"}
    parameters: ClassVar[tuple[str, ...]] = (
        "query",
        "key_cache",
        "value_cache",
        "block_table",
        "seq_lens",
        "query_start_loc",
    )
    keywords: ClassVar[Mapping[str, str]] = MappingProxyType({
        "window": "window", "softcap": "softcap", "sinks": "sinks", "alibi": "alibi_slopes",
        "int8": "key_scale", "fp8_e4m3": "key_scale", "fp8_e5m2": "key_scale",
        "noncausal": "causal",
    })  # fmt: skip
    reference: ClassVar[Callable[..., Any]] = staticmethod(reference.paged_attention)

    @staticmethod
    def arguments(s: SimpleNamespace) -> Arguments:
        """See `Interface.arguments`."""
        values = s.key_cache[..., : s.projection.shape[1]] if s.latent else s.value_cache
        value_scale = s.key_scale if s.latent else s.value_scale
        options = {
            "causal": None if s.causal else False, "window": s.window, "softcap": s.softcap,
            "alibi_slopes": s.slopes, "sinks": s.sinks, "key_scale": s.key_scale,
            "value_scale": value_scale,
        }  # fmt: skip
        args = s.query, s.key_cache, values, s.block_table, s.seq_lens, s.starts, s.scale
        return args, {name: value for name, value in options.items() if value is not None}

    @staticmethod
    def results(returned: Any, args: tuple[Any, ...]) -> tuple[Tensor, Tensor | None]:
        """See `Interface.results`."""
        return returned if isinstance(returned, (tuple, list)) else (returned, None)  # type: ignore[return-value]

    @classmethod
    def matches(cls, parameters: list[str]) -> bool:
        """See `Interface.matches`."""
        return super().matches(parameters) and "slot_mapping" not in parameters


class OpWrite(Op):
    """The op ``compiled_attn::paged_attention_``, which writes new tokens first."""

    name = "op_write"
    features = frozenset(FEATURES) - {"rotary", "empty_rows"}
    parameters: ClassVar[tuple[str, ...]] = (
        "query",
        "key",
        "value",
        "key_cache",
        "value_cache",
        "slot_mapping",
    )
    appends = "always"
    reference: ClassVar[Callable[..., Any]] = staticmethod(reference.paged_attention_)

    @staticmethod
    def arguments(s: SimpleNamespace) -> Arguments:
        """See `Interface.arguments`."""
        options = {
            "causal": None if s.causal else False, "window": s.window, "softcap": s.softcap,
            "alibi_slopes": s.slopes, "sinks": s.sinks, "key_scale": s.key_scale,
            "value_scale": s.value_scale,
        }  # fmt: skip
        caches, step = (s.key_cache, s.value_cache), (s.block_table, s.seq_lens, s.starts)
        args = s.query, s.key, s.value, *caches, s.slots, *step, s.scale
        return args, {name: value for name, value in options.items() if value is not None}

    @classmethod
    def matches(cls, parameters: list[str]) -> bool:
        """See `Interface.matches`."""
        return {*cls.parameters} <= {*parameters}

    @classmethod
    def why_not(cls, step: Step) -> str | None:
        """See `Interface.why_not`."""
        return "needs separate values" if step.latent else None


class Flash(Interface):
    """``flash_attn_with_kvcache`` of FlashAttention 2."""

    name = "flash"
    rows = "equal"
    features = _COMMON | {"softcap", "alibi", "append", "rotary"}
    parameters: ClassVar[tuple[str, ...]] = (
        "q",
        "k_cache",
        "v_cache",
        "cache_seqlens",
        "block_table",
    )
    keywords: ClassVar[Mapping[str, str]] = MappingProxyType({
        "window": "window_size", "softcap": "softcap", "alibi": "alibi_slopes", "append": "k",
        "rotary": "rotary_cos", "lse": "return_softmax_lse", "noncausal": "causal",
        "chunked": "causal",
    })  # fmt: skip
    appends = "optional"
    reference: ClassVar[Callable[..., Any]] = staticmethod(reference.flash_attn_with_kvcache)

    @staticmethod
    def arguments(s: SimpleNamespace) -> Arguments:
        """See `Interface.arguments`."""

        def by_request(rows: Tensor) -> Tensor:
            split: Tensor = rows.unflatten(0, (-1, s.counts[0]))
            return split

        options: dict[str, Any] = {
            "cache_seqlens": s.seq_lens - s.counts[0] * s.append, "block_table": s.block_table,
            "softmax_scale": s.scale, "causal": s.causal,
        }  # fmt: skip
        if s.append:
            options |= {"k": by_request(s.key), "v": by_request(s.value)}
        if s.cos is not None:
            options |= {"rotary_cos": s.cos, "rotary_sin": s.sin, "rotary_interleaved": True}
        if s.window is not None:
            options["window_size"] = (s.window - 1, 0)
        if s.softcap is not None:
            options["softcap"] = s.softcap
        if s.slopes is not None:
            options["alibi_slopes"] = s.slopes
        if s.lse:
            options["return_softmax_lse"] = True
        return (by_request(s.query), s.key_cache, s.value_cache), options

    @staticmethod
    def results(returned: Any, args: tuple[Any, ...]) -> tuple[Tensor, Tensor | None]:
        """See `Interface.results`."""
        out, lse = (returned if isinstance(returned, (tuple, list)) else (returned, None))[:2]
        return out.flatten(0, 1), None if lse is None else _sums(lse.transpose(1, 2).flatten(0, 1))


class Varlen(Interface):
    """``torch.nn.attention.varlen.varlen_attn`` over a paged cache."""

    name = "varlen"
    features = _COMMON | {"mixed"}
    parameters: ClassVar[tuple[str, ...]] = (
        "query",
        "key",
        "value",
        "cu_seq_q",
        "cu_seq_k",
        "max_q",
        "max_k",
        "block_table",
    )
    keywords: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"window": "window_size", "lse": "return_aux"}
    )
    reference: ClassVar[Callable[..., Any]] = staticmethod(reference.varlen_attn)

    @staticmethod
    def arguments(s: SimpleNamespace) -> Arguments:
        """See `Interface.arguments`."""
        left = -1 if s.window is None else s.window - 1
        options = {
            "scale": s.scale, "window_size": (left, 0) if s.causal else (-1, -1),
            "seqused_k": s.seq_lens, "block_table": s.block_table,
        }  # fmt: skip
        if s.query.shape[1] != s.key_cache.shape[2]:
            options["enable_gqa"] = True
        if s.lse:
            from torch.nn.attention.varlen import AuxRequest

            options["return_aux"] = AuxRequest(lse=True)
        most = max(s.counts, default=1), s.capacity
        return (s.query, s.key_cache, s.value_cache, s.starts, None, *most), options

    @staticmethod
    def results(returned: Any, args: tuple[Any, ...]) -> tuple[Tensor, Tensor | None]:
        """See `Interface.results`."""
        out, lse = (returned if isinstance(returned, (tuple, list)) else (returned, None))[:2]
        if lse is not None and lse.shape != out.shape[:2]:  # as torch 2.11 to 2.15 have it
            lse = lse.t()
        return out, None if lse is None else _sums(lse)


class VarlenPacked(Varlen):
    """``varlen_attn`` without a block table: packed keys and values."""

    name = "varlen_packed"
    features = frozenset(
        ("chunked", "mixed", "window", "noncausal", "lse", "empty_rows", "replay", "padding_rows")
    )
    parameters: ClassVar[tuple[str, ...]] = Varlen.parameters[:-1]

    @staticmethod
    def arguments(s: SimpleNamespace) -> Arguments:
        """See `Interface.arguments`."""
        lengths = s.seq_lens.tolist()
        packed = []
        for cache in (s.key_cache, s.value_cache):
            rows = [cache[blocks].flatten(0, 1) for blocks in s.block_table]
            rows = [each[:length] for each, length in zip(rows, lengths, strict=True)]
            spare = cache.new_zeros(s.capacity * len(lengths) - sum(lengths), *cache.shape[2:])
            packed.append(torch.cat([*rows, spare]))
        starts = torch.cat([s.starts[:1], s.seq_lens.cumsum(0).to(s.starts.dtype)])
        left = -1 if s.window is None else s.window - 1
        options: dict[str, Any] = {
            "scale": s.scale, "window_size": (left, 0) if s.causal else (-1, -1),
        }  # fmt: skip
        if s.query.shape[1] != s.key_cache.shape[2]:
            options["enable_gqa"] = True
        if s.lse:
            from torch.nn.attention.varlen import AuxRequest

            options["return_aux"] = AuxRequest(lse=True)
        most = max(s.counts, default=1), s.capacity
        return (s.query, *packed, s.starts, starts, *most), options

    @classmethod
    def matches(cls, parameters: list[str]) -> bool:
        """See `Interface.matches`."""
        return {*cls.parameters} <= {*parameters} and "block_table" not in parameters


def paged_arguments(s: SimpleNamespace) -> tuple[Any, ...]:
    """Returns the arguments of `PagedV1`."""
    x, heads = 16 // s.key_cache.element_size(), s.key_cache.shape[2]
    keys = s.key_cache.unflatten(3, (-1, x)).permute(0, 2, 3, 1, 4)
    caches = [keys.contiguous(), s.value_cache.permute(0, 2, 3, 1).contiguous()]
    if s.strided:  # every other block belongs to another cache
        for at, cache in enumerate(caches):
            wide = torch.zeros_like(cache).unsqueeze(1).repeat_interleave(2, 1)
            caches[at] = wide[:, 1].copy_(cache)
    out = torch.full(s.query.shape, float("nan"), dtype=s.query.dtype, device=s.query.device)
    scales: list[Any] = [1.0, 1.0]
    if s.cache_dtype:
        scales = [torch.tensor(each, device=out.device) for each in (s.k_scale, s.v_scale)]
    return (
        out, s.query, *caches, heads, s.scale, s.block_table, s.seq_lens, s.block_size,
        s.capacity, s.slopes, s.cache_dtype or "auto", *scales,
    )  # fmt: skip


class PagedV1(Interface):
    """``paged_attention_v1`` of vLLM: one query row per request, keys in packed layout."""

    name = "paged_v1"
    rows = "one"
    features = _PAGED | {"alibi", "int8", "fp8_e4m3", "fp8_e5m2"}
    parameters: ClassVar[tuple[str, ...]] = (
        "out", "query", "key_cache", "value_cache", "num_kv_heads", "scale", "block_tables",
        "seq_lens", "block_size", "max_seq_len",
    )  # fmt: skip
    reference: ClassVar[Callable[..., Any]] = staticmethod(reference.paged_attention_v1)

    outputs = 1

    @staticmethod
    def arguments(s: SimpleNamespace) -> Arguments:
        """See `Interface.arguments`."""
        return paged_arguments(s), {}

    @staticmethod
    def results(returned: Any, args: tuple[Any, ...]) -> tuple[Tensor, Tensor | None]:
        """See `Interface.results`."""
        return args[0], None

    @classmethod
    def why_not(cls, step: Step) -> str | None:
        """See `Interface.why_not`."""
        x = 16 // (QUANTISED[step.cache] if step.cache else step.dtype).itemsize
        return f"packs {x} elements" if step.head_dim % x else None

    @classmethod
    def matches(cls, parameters: list[str]) -> bool:
        """See `Interface.matches`."""
        return {*cls.parameters} <= {*parameters} and "exp_sum" not in parameters


class PagedV2(PagedV1):
    """``paged_attention_v2`` of vLLM, with buffers for partitions of 512 keys."""

    name = "paged_v2"
    outputs = 4
    parameters: ClassVar[tuple[str, ...]] = (
        *PagedV1.parameters,
        "exp_sum",
        "max_logits",
        "tmp_out",
    )
    reference: ClassVar[Callable[..., Any]] = staticmethod(reference.paged_attention_v2)

    @staticmethod
    def arguments(s: SimpleNamespace) -> Arguments:
        """See `Interface.arguments`."""
        out, *rest = paged_arguments(s)
        shape = (*out.shape[:2], -(-s.capacity // 512))
        sums = [torch.full(shape, float("nan"), device=out.device) for _ in range(2)]
        partial = torch.full((*shape, out.shape[2]), float("nan"), dtype=out.dtype)
        return (out, *sums, partial.to(out.device), *rest), {}

    @classmethod
    def matches(cls, parameters: list[str]) -> bool:
        """See `Interface.matches`."""
        return {*cls.parameters} <= {*parameters}


INTERFACES: Mapping[str, type[Interface]] = MappingProxyType(
    {
        each.name: each
        for each in (Flash, PagedV1, PagedV2, Varlen, VarlenPacked, Unified, Op, OpWrite)
    }
)
"""The known interfaces by name."""
