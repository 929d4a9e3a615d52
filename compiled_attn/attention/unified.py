"""Unified attention: one call for a whole engine step, whatever mix of requests is in it.

Writes new tokens to the paged cache, then merges three partial attentions (causal, shared, unique).
After the unified attention of the Gaudi vLLM plugin, whose names `UnifiedMetadata` uses.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_attn.attention.by_parts import attend_parts, fastest
from compiled_attn.attention.by_rank import attend_ranks
from compiled_attn.attention.call import UnifiedCall, check
from compiled_attn.attention.metadata import UnifiedMetadata
from compiled_attn.attention.scoring import Scoring
from compiled_attn.attention.state import Attend
from compiled_attn.ops import KernelChoice, NewTokens, attend_paged, chooses_native

__all__ = ["unified_attention"]


def unified_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    key_cache: Tensor,
    value_cache: Tensor | None,
    scale: float,
    metadata: UnifiedMetadata,
    *,
    sliding_window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    value_projection: Tensor | None = None,
    return_lse: bool = False,
    attend: Attend | None = None,
    kernel: KernelChoice = "auto",
    fused_write: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """Writes this step's keys and values to the cache, then attends each token to those it may see.

    Args:
        query: ``[T, H, D]``, fp32, fp64, bf16 or fp16; softmax statistics are at least float32.
        key: ``[T, Hk, D]``, this step's tokens of all requests, flattened. ``H % Hk == 0``.
        value: ``[T, Hk, Dv]``; None (with ``value_cache``): the values are the first elements of
            the keys, as many as ``value_projection`` takes, else all (multi-head latent attention:
            ``query`` and ``key`` are then in latent space).
        key_cache, value_cache: flat slots ``[num_blocks * block_size, Hk, D]`` and ``[..., Hk,
            Dv]``; written in place at ``metadata.slot_mapping``, nowhere else.
        scale: factor of the scores, usually ``D ** -0.5``.
        metadata: who sees what.
        sliding_window: tokens that a token sees, itself included. None: all before it.
        softcap: cap c of ``c * tanh(score / c)``.
        alibi_slopes: ``[H]``; a score gains ``slope * (key position - query position)``.
        sinks: ``[H]``, score of a head's attention sink.
        key_scale, value_scale: ``[num_blocks * block_size, Hk]`` float32, for caches of int8,
            float8_e4m3fn or float8_e5m2: what an element of each token and head is multiplied by;
            written in place like the caches. Without V only ``key_scale``.
        value_projection: ``[H, R, Dv]``, applied to the output of each head, R its input size.
        return_lse: also return the log-sum-exp ``[T, H]`` in float32, for merging across devices.
        attend: the kernel of the causal and shared parts where plain torch serves the call. None:
            the fastest that can (`SdpaKernel.attend` of `compiled_attn.attention.sdpa`, which has
            no gradients and no softcap), or the reference. Else
            `compiled_attn.attention.dense.attend`, or a function of its signature.
        kernel: "native": the C++ kernel, which reads what ``metadata`` says request by request;
            "portable": the three parts; "auto": native where it supports the call. Where keys lie
            on several ranks (``metadata.ranks``), it is always the op that attends.
        fused_write: whether the native kernel also writes the cache. False inside of a
            `torch.compiler.nested_compile_region`, where torch refuses ops that write: there torch
            writes, and the kernel reads.

    New tokens are seen as the cache stores them, rounded to its element type, so that results of a
    prompt do not depend on how it is cut into chunks.

    Returns:
        ``[T, H, Dv]`` in the query's dtype; a row that sees nothing is zero and has lse -inf;
        a step without tokens (T = 0) is empty.

    Raises:
        ValueError: shapes, devices or sizes that do not fit together, or a step without any part; a
            tensor of ``metadata``, a query, key or value in the memory of a cache or its scale;
            outside of a compiled or captured graph also a slot, block or row out of range and two
            tokens with one slot. Nothing is written.
        TypeError: dtypes that do not fit together; a scale that is None. Nothing is written.
        KernelArgumentError, NativeUnavailable: ``kernel`` is "native", but it cannot serve the call
            or be built here; the former, a ValueError and a RuntimeError, also for numbers that the
            native kernel finds out of range. Nothing is written.
        IndexError, RuntimeError: inside of a graph, a number out of range, when it is used.

    Source: MLA of DeepSeek-V2 (2024), sinks of gpt-oss, ALiBi of Press et al. (2022).
    """
    scoring = Scoring(
        scale, window=sliding_window, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks
    )
    call = UnifiedCall(
        query, key, value, key_cache, value_cache, metadata, scoring, key_scale, value_scale,
        value_projection,
    )  # fmt: skip
    check(call)
    traits = call.traits()
    kernel = kernel if metadata.segment is None else "native"
    if metadata.ranks is None and chooses_native(kernel, traits):
        new = None
        if fused_write and value is not None:
            new = NewTokens(key, value, metadata.slot_mapping)
        else:
            call.write_tokens()
        out, log_sum = attend_paged(call.paged(new))
    else:
        tokens, paged = call.write_tokens(), call.paged(None)
        if metadata.ranks is not None:
            out, log_sum = attend_ranks(paged, *tokens, metadata)
        else:
            out, log_sum = attend_parts(paged, *tokens, metadata, attend or fastest(traits))
    if value_projection is not None:
        # Linear, so once after the merge instead of once a part.
        out = torch.einsum("thr,hrv->thv", out, value_projection.to(out.dtype))
    out = out.to(query.dtype)
    return (out, log_sum) if return_lse else out
