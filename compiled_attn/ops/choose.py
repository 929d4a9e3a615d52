"""Selects the kernel of a paged attention and calls it: for unified attention, flash and paged."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Literal, TypeVar, get_args

import torch
from torch import Tensor

from compiled_attn.cache.quantisation import QUANTISED
from compiled_attn.errors import KernelArgumentError, NativeUnavailable
from compiled_attn.ops.call import PagedCall
from compiled_attn.ops.paged_attention import NAMESPACE, call_op, load
from compiled_attn.ops.traits import AttentionTraits, Implementation
from compiled_attn.ops.triton.register import why_not as why_no_triton
from graphs.torch_internals.dispatch import has_kernel
from graphs.torch_internals.tracing import constant_in_traces

__all__ = [
    "CHOICES", "KernelChoice", "NativeKernel", "PortableKernel", "as_int32", "attend_paged",
    "choose", "chooses_native", "serves_quantised", "unavailable", "unit_strides",
]  # fmt: skip

_INT32 = torch.iinfo(torch.int32)

KernelChoice = Literal["auto", "native", "portable"]
"""``native``: the op's kernel for the device (C++, Triton) or an error; ``portable``: plain torch;
``auto``: native if possible."""

CHOICES: tuple[KernelChoice, ...] = get_args(KernelChoice)


Chosen = TypeVar("Chosen", bound=Implementation)


_default = functools.cache(load)


@constant_in_traces
def unavailable() -> str | None:
    """Returns why the ops are not native in this process, or None; builds them on first use."""
    return _default().why_not_native


class NativeKernel(Implementation):
    """The kernel behind ``torch.ops.compiled_attn.paged_attention``: C++ for CPUs, Triton."""

    name = "native"

    def supports(self, traits: AttentionTraits) -> str | None:
        """See `Implementation`."""
        return _lacks_metadata(traits) or _lacks_scores(traits) or _lacks_dtypes(traits)

    def unavailable(self, traits: AttentionTraits) -> str | None:
        """See `Implementation`; builds the CPU kernel on first use."""
        why: str | None = unavailable() if traits.device == "cpu" else None
        return why


class PortableKernel(Implementation):
    """Attention in plain PyTorch."""

    name = "portable"

    def supports(self, traits: AttentionTraits) -> str | None:
        """See `Implementation`."""
        return None if traits.by_parts else "takes metadata with parts, not by request alone"


_KERNELS: tuple[Implementation, ...] = (NativeKernel(), PortableKernel())


def choose(traits: AttentionTraits, among: Sequence[Chosen]) -> Chosen:
    """Returns the first implementation that can serve an attention; traceable.

    Raises:
        KernelArgumentError: none supports it; the message gives each one's reason.
        NativeUnavailable: one supports it, but is not available here.
    """
    reasons: list[str] = []
    error: type[RuntimeError] = KernelArgumentError
    for each in among:
        lacks = each.supports(traits)
        reason = each.unavailable(traits) if lacks is None else lacks
        if reason is None:
            return each
        error = NativeUnavailable if lacks is None else error
        reasons.append(f"{each.name} {reason}")
    raise error(
        f"expected a kernel that can serve the attention, got none: {'; '.join(reasons)}; "
        f"{_remedy(traits)}"
    )


def _remedy(traits: AttentionTraits) -> str:
    if traits.by_parts:
        return 'change the call, or pass kernel="auto"'
    ways = []
    if traits.gradients:
        ways.append("call it under torch.no_grad()")
    if traits.dtype == torch.float64:
        ways.append("cast query, key, value and the caches to float32")
    if not ways:
        return 'change the call, or pass kernel="auto"'
    return (
        f"{' and '.join(ways)}, or build metadata in parts (BatchBuilder.plan) and pass "
        'kernel="auto"'
    )


def chooses_native(kernel: KernelChoice, traits: AttentionTraits) -> bool:
    """Whether the native kernel serves an attention, else plain torch; traceable.

    Raises:
        ValueError: unknown choice.
        KernelArgumentError, NativeUnavailable: no kernel of that choice can, see `choose`.
    """
    if kernel not in CHOICES:
        raise ValueError(f"expected a kernel of {CHOICES}, got {kernel!r}: choose one of these")
    among = [each for each in _KERNELS if kernel in ("auto", each.name)]
    return choose(traits, among).name == "native"


def attend_paged(call: PagedCall) -> tuple[Tensor, Tensor]:
    """Calls the op, for any integer dtypes and strides: out ``[T, H, Dv]`` and lse ``[T, H]``.

    The last stride of the caches must be 1, since the op writes them in place.

    Raises:
        KernelArgumentError: invalid arguments, such as a block out of range; a ``RuntimeError`` in
            a compiled or captured graph that calls C++.
    """
    scoring = call.scoring
    slopes, sinks = scoring.alibi_slopes, scoring.sinks
    ints = call.block_table, call.seq_lens, call.query_start_loc
    step = [_dense_rows(as_int32(each)) for each in ints]
    options = {
        "causal": call.causal,
        "window": scoring.window,
        "softcap": scoring.softcap,
        "alibi_slopes": None if slopes is None else slopes.float().contiguous(),
        "sinks": None if sinks is None else sinks.float().contiguous(),
        "key_scale": call.key_scale,
        "value_scale": call.value_scale,
        "segment": call.segment,
    }
    query, caches = _dense_rows(call.query), (call.key_cache, call.value_cache)
    if call.new is None:
        op = torch.ops.compiled_attn.paged_attention
        out, lse = call_op(op, query, *caches, *step, scoring.scale, **options)
        return out, lse
    key, value, slots = call.new
    op = torch.ops.compiled_attn.paged_attention_
    out, lse = call_op(
        op, query, _dense_rows(key), _dense_rows(value), *caches, slots.long().contiguous(), *step,
        scoring.scale, **options,
    )  # fmt: skip
    return out, lse


def as_int32(ints: Tensor) -> Tensor:
    """Casts block ids, lengths or offsets to int32; values out of range become -1, an error."""
    if ints.dtype == torch.int32:
        return ints
    if ints.dtype == torch.int64:
        ints = torch.where((ints >= _INT32.min) & (ints <= _INT32.max), ints, -1)
    return ints.int()


def _dense_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() > 1 and tensor.stride(-1) == 1 else tensor.contiguous()


def unit_strides(*caches: Tensor) -> bool:
    """Whether the last axis of caches is dense."""
    return all(cache.stride(-1) == 1 or cache.shape[-1] == 1 for cache in caches)


def _lacks_metadata(traits: AttentionTraits) -> str | None:
    if not traits.by_request:
        return "takes metadata by request"
    if traits.partitions:
        return "has no partitions: call paged_attention_v1"
    if traits.left_pad:
        return "has no left pad"
    if traits.gradients:
        return "has no gradients"
    if traits.layout == "packed":
        return "reads caches of layout flat, NHD or HND, not packed"
    if not traits.unit_stride:
        return "reads caches whose last stride is 1"
    return None


def _lacks_scores(traits: AttentionTraits) -> str | None:
    left, right = traits.window
    if right > 0 or (right < 0 <= left):
        return f"has no window of ({left}, {right}), only causal ones"
    if traits.alibi > 1:
        return "has ALiBi slopes for all rows alike, not for each row"
    if traits.alibi and right != 0:
        return "has ALiBi for causal attention only"
    return None


def _lacks_dtypes(traits: AttentionTraits) -> str | None:
    cache_dtype, value_dtype = traits.cache_dtypes
    if lacks := _lacks_device(traits.device):
        return str(lacks)
    if traits.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"computes in float32, bfloat16 and float16, not in {traits.dtype}"
    if cache_dtype != value_dtype:
        return "has keys and values of one dtype"
    if cache_dtype != traits.dtype and cache_dtype not in QUANTISED:
        return f"has no cache of {cache_dtype} for queries of {traits.dtype}"
    return None


@constant_in_traces
def _lacks_device(device: str) -> str | None:
    if device == "cpu":
        return None
    load()  # defines the op
    if has_kernel(f"{NAMESPACE}::paged_attention", device):
        return None
    if device == "cuda":
        return f"runs on cuda by Triton, {why_no_triton()}"
    return f"runs on cpu and cuda, not on {device}"


@constant_in_traces
def serves_quantised(device: str, dtype: torch.dtype) -> bool:
    """Whether a type of device has ``quantised_linear`` for inputs of a dtype."""
    if dtype not in (torch.float32, torch.bfloat16) and (
        device == "cpu" or dtype is not torch.float16
    ):
        return False
    if device == "cpu":
        return True
    _default()  # defines the op
    return has_kernel(f"{NAMESPACE}::quantised_linear", device)
