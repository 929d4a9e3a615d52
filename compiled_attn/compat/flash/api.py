"""`flash_attn_with_kvcache` as FlashAttention 2 defines it, on any device."""

from __future__ import annotations

from torch import Tensor

from compiled_attn.compat.flash.call import FlashCall
from compiled_attn.compat.flash.forward import forward
from compiled_attn.ops import KernelChoice

__all__ = ["flash_attn_with_kvcache"]


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Tensor | int | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    kernel: KernelChoice = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Appends new tokens to a KV cache in place, then attends queries to all tokens of their row.

    Row b has ``L = cache_seqlens[b]`` tokens in the cache before the call, its left pad included,
    and ``L + Sn`` after it. The queries are its last tokens: the own position of query i is
    ``L + Sn - Sq + i`` (bottom-right alignment). There is no backward.

    Args:
        q: ``[B, Sq, H, D]``, not modified. float16, bfloat16, float32 or float64; ``D <= 256``.
        k_cache, v_cache: ``[Bc, Sc, Hk, D]``, or pages ``[NP, P, Hk, D]`` of any size P with
            ``block_table``. Any strides but the last, which is 1; views are written through.
            Query head h reads key head ``h // (H // Hk)``; ``H % Hk == 0``. What lies outside of
            the rows' tokens may be NaN.
        k, v: ``[B, Sn, Hk, D]``, written to positions ``L .. L + Sn - 1`` before attending; both or
            neither.
        rotary_cos, rotary_sin: ``[R, rd / 2]``, contiguous, ``rd % 16 == 0``, R at least the cache
            length. Rotate the first rd elements of k (by its position) and of q; only with k. Query
            i is rotated as position ``L + i`` if ``causal`` or a window is set, else as position
            ``L``.
        cache_seqlens: ints ``[B]`` or an int. None: the cache is full, only without k.
        cache_batch_idx: ints ``[B]``, row of the contiguous cache (or of ``block_table``) that each
            row reads and writes; None: row b.
        cache_leftpad: ints ``[B]``, slots at the start of each row that are not part of its
            sequence.
        block_table: ints ``[B, W]``; token t of row b lies in page ``block_table[b, t // P]``, slot
            ``t % P``. Entries past a row's last token are never looked up and may be anything.
        softmax_scale: factor of the scores; None: ``D ** -0.5``.
        causal: a query sees nothing to the right of its own position.
        window_size: tokens to the left and right of its own position that a query sees; -1: all.
            ``causal`` overrides the right side.
        softcap: cap c of ``c * tanh(score / c)`` if positive.
        rotary_interleaved: True pairs (0, 1), (2, 3), ..; False pairs (i, i + rd / 2).
        alibi_slopes: float32 ``[H]`` or ``[B, H]``; adds ``-slope * distance`` to the capped
            scores.
        num_splits: slices of the keys that are attended to one after the other, 0 to 128; 0: as few
            as keep the scores of a slice under 64 MiB. Changes the result by rounding only.
        return_softmax_lse: also return the log-sum-exp of the scores.
        kernel: "native": the C++ kernel or an error, "portable": plain torch, "auto": native where
            it supports the call, see docs/reference/kernels.md. The native kernel ignores
            ``num_splits``.

    Returns:
        ``[B, Sq, H, D]`` in q's dtype, zeros where a query sees no key. With ``return_softmax_lse``
        also ``[B, H, Sq]`` in float32 (float64 for float64 q), natural logarithm, -inf where a
        query sees no key.

    Raises:
        FlashArgumentError: (a ``RuntimeError`` and a ``ValueError``) the arguments do not fit
            together; new tokens or an integer tensor lie in the memory of a cache that is written;
            a row has no room for its new tokens; a page that a row uses does not exist,
            or gets two new tokens in one slot. Nothing has been written then. Inside a compiled
            or captured graph, numbers in tensors are not read but asserted (``RuntimeError``).
        KernelArgumentError, NativeUnavailable: ``kernel`` is "native", but it cannot serve the call
            or be built here. Nothing has been written then.
        TypeError: an argument that is not the tensor or the number that it must be.

    Source: ``flash_attn_with_kvcache`` of FlashAttention 2.8 (Dao et al.); see
    docs/reference/flash.md for the differences.
    """
    call = FlashCall(
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx,
        cache_leftpad, block_table, softmax_scale, causal, window_size, softcap,
        rotary_interleaved, alibi_slopes, num_splits, return_softmax_lse, kernel,
    )  # fmt: skip
    out, lse = forward(call)
    return (out, lse) if return_softmax_lse else out
