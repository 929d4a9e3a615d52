"""Torch's flash attention over pages, ``torch.nn.attention.varlen``, as a kernel of the op.

Supports fewer calls than Triton; used where a warmup measured it to be faster
(`compiled_attn.ops.triton.autotune`). It differs in two ways: a non-finite value in any slot of a
request makes all its rows NaN, even rows that do not see it; and indices are not checked.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from compiled_attn.ops.call import PagedCall
from compiled_attn.ops.traits import AttentionTraits, Implementation

__all__ = ["VarlenKernel", "active_implementation", "attend", "traits_of", "why_not"]

_MAX_HEAD_DIM = 256
_MODULE = "torch.nn.attention.varlen"


class VarlenKernel(Implementation):
    """The kernel behind ``torch.nn.attention.varlen.varlen_attn`` with a block table."""

    name = "varlen"

    def supports(self, traits: AttentionTraits) -> str | None:
        """See `compiled_attn.ops.traits.Implementation`."""
        if traits.device != "cuda":
            return f"runs on cuda, not on {traits.device}"
        if traits.gradients:
            return "has no gradients over pages"
        return _lacks_scores(traits) or _lacks_sizes(traits)

    def unavailable(self, traits: AttentionTraits) -> str | None:
        """See `compiled_attn.ops.traits.Implementation`."""
        if "block_table" not in inspect.signature(_varlen_attn()).parameters:
            return f"needs torch 2.12: the one of {torch.__version__} takes no block table"
        active = active_implementation()
        if active not in ("FA3", "FA4"):
            return (
                "needs FA3 (sm_90) or FA4 (sm_100), as FA2 of torch has no pages: call "
                "torch.nn.attention.activate_flash_attention_impl"
            )
        if active == "FA4" and traits.page not in (None, 128):
            return f"has pages of 128 with FA4, not of {traits.page}"
        return None


def active_implementation() -> str | None:
    """Returns torch's active flash attention, such as "FA3"; None: the default, without pages."""
    active: Any = getattr(import_module("torch.nn.attention"), "current_flash_attention_impl", None)
    return active() if active else None


def why_not(call: PagedCall) -> str | None:
    """Returns why it cannot serve a call here, or None."""
    traits, kernel = traits_of(call), VarlenKernel()
    return kernel.supports(traits) or kernel.unavailable(traits)


def traits_of(call: PagedCall) -> AttentionTraits:
    """Returns the traits of a call."""
    scoring = call.scoring
    left = -1 if scoring.window is None else scoring.window - 1
    return AttentionTraits(
        call.query.device.type, call.query.dtype, (call.key_cache.dtype, call.value_cache.dtype),
        call.query.shape[2], softcap=scoring.softcap is not None,
        alibi=0 if scoring.alibi_slopes is None else 1,
        window=(left, 0) if call.causal else (-1, -1), sinks=scoring.sinks is not None,
        value_dim=call.value_cache.shape[3], page=call.key_cache.shape[1],
    )  # fmt: skip


def attend(call: PagedCall) -> tuple[Tensor, Tensor]:
    """Computes out ``[T, H, D]`` and lse ``[T, H]`` of a supported call, see `why_not`.

    The caches already hold the new tokens. Passes sizes of the bucket, so that a captured graph is
    valid for any lengths.
    """
    query, starts = call.query, call.query_start_loc
    tokens, width = query.shape[0], call.block_table.shape[1]
    aux: Any = import_module(_MODULE)
    out, lse = _varlen_attn()(
        query, call.key_cache, call.value_cache, starts, None, tokens,
        width * call.key_cache.shape[1], return_aux=aux.AuxRequest(lse=True),
        scale=float(call.scoring.scale), window_size=traits_of(call).window,
        enable_gqa=query.shape[1] != call.key_cache.shape[2], seqused_k=call.seq_lens,
        block_table=call.block_table,
    )  # fmt: skip
    row = torch.arange(tokens, device=query.device)
    is_own = ((row >= starts[0]) & (row < starts[-1]))[:, None]
    # Rows that see nothing have an lse of either infinity; rows of no request are not written.
    lse = torch.where(is_own & ~lse.t().isinf(), lse.t(), float("-inf"))
    return torch.where(is_own[:, None], out, 0.0), lse.contiguous()


def _varlen_attn() -> Callable[..., Any]:
    function: Callable[..., Any] = import_module(_MODULE).varlen_attn
    return function


def _lacks_scores(traits: AttentionTraits) -> str | None:
    has = {"softcap": traits.softcap, "ALiBi": traits.alibi, "sinks": traits.sinks}
    lacks = [name for name, is_wanted in has.items() if is_wanted]
    return f"has no {' and no '.join(lacks)}" if lacks else None


def _lacks_sizes(traits: AttentionTraits) -> str | None:
    dim, value_dim = traits.head_dim, traits.value_dim
    if traits.dtype not in (torch.float16, torch.bfloat16):
        return f"computes in float16 and bfloat16, not in {traits.dtype}"
    if any(dtype != traits.dtype for dtype in traits.cache_dtypes):
        return f"has no cache of {traits.cache_dtypes[0]} for queries of {traits.dtype}"
    if dim is not None and (dim > _MAX_HEAD_DIM or dim % 8):
        return f"has head sizes that 8 divides, up to {_MAX_HEAD_DIM}, not {dim}"
    if value_dim not in (None, dim):
        return f"has values of the head size of keys, {dim}, not {value_dim}"
    return None
