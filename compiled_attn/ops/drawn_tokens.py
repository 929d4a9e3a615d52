"""The op ``drawn_tokens``: a token of each row of logits, the most likely one or one that is drawn.

A draw is a place in the running sum of the row's weights, the most likely token first, of equal
ones the lower id. The sums are of float64. The native op sorts no row, and tells where the token
would depend on the order of the additions: what is here then decides.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["NATIVE_DTYPES", "NO_TOKEN", "UNDECIDED", "drawn", "fake", "likely", "reference"]

NATIVE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Of logits that the native op takes."""
NO_TOKEN = -1
"""Stands where a row has no token, as its logits are not finite."""
UNDECIDED = -2
"""Stands where the native op cannot tell the token."""


def likely(logits: Tensor) -> Tensor:
    """The most likely token of each row of ``[R, vocab]``, or `NO_TOKEN`: ``[R]`` int64."""
    best, tokens = logits.max(-1)
    return torch.where(best.isfinite(), tokens, NO_TOKEN)


def drawn(
    logits: Tensor,
    likely: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniform: Tensor,
) -> Tensor:
    """The token of each row, ``[R]`` int64: that of `likely`, or one that is drawn.

    Args:
        logits: ``[R, vocab]``, any float dtype.
        likely: ``[R]``, of `likely`.
        temperature: ``[R]`` float64; 0: the most likely token is taken.
        top_k: ``[R]`` int64; how many of the most likely are kept, 1 or more.
        top_p, min_p: ``[R]`` float64, as in `compiled_attn.engine.SamplingParams`.
        uniform: ``[R]`` float64 in [0, 1), the place in the running sum of what is kept.
    """
    settings = temperature, top_k, top_p, min_p, uniform
    temperature, top_k, top_p, min_p, uniform = (each.unsqueeze(1) for each in settings)
    values, tokens = logits.sort(dim=-1, descending=True, stable=True)
    values = values.double()
    is_drawn = (temperature > 0) & (likely >= 0).unsqueeze(1)
    weights = ((values - values[:, :1]) / torch.where(is_drawn, temperature, 1.0)).exp()
    rank = torch.arange(logits.shape[1], device=logits.device)
    weights = torch.where(rank < top_k, weights, 0.0)
    sums = weights.cumsum(1)
    # A token stays if the more likely ones don't reach top_p yet: the first one always stays.
    is_kept = (sums - weights < top_p * sums[:, -1:]) & (weights >= min_p)
    weights = torch.where(is_kept, weights, 0.0)
    sums = weights.cumsum(1)
    place = (sums <= uniform * sums[:, -1:]).sum(1, keepdim=True)
    last = (weights > 0).sum(1, keepdim=True) - 1
    chosen = tokens.gather(1, place.minimum(last).clamp_min(0))
    return torch.where(is_drawn, chosen, likely.unsqueeze(1)).squeeze(1)


def reference(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniform: Tensor,
) -> Tensor:
    """The op in Python: `drawn`, or the most likely tokens where none is drawn; or `NO_TOKEN`."""
    best = likely(logits)
    at = (temperature > 0).nonzero().squeeze(1)
    settings = temperature, top_k, top_p, min_p, uniform
    for some in at.split(_ROWS):
        best[some] = drawn(logits[some], best[some], *(each[some] for each in settings))
    return best


def fake(logits: Tensor, temperature: Tensor, top_k: Tensor, *_: Tensor) -> Tensor:
    """The result's shape."""
    return torch.empty_like(top_k)


_ROWS = 16  # sorted at once: of a vocabulary of 128k they and their sums take 100 MB
