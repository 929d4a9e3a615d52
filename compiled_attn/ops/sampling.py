"""The op ``sample_tokens``: one token per row of logits, greedy or sampled.

A sample is a position in the cumulative weights of a row, sorted by descending logit, then id; sums
are float64. The native op does not sort, and reports rows where rounding could change the token:
the reference then decides.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["NATIVE_DTYPES", "NO_TOKEN", "UNDECIDED", "fake", "greedy", "reference", "sample"]

NATIVE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of logits that the native op takes."""
NO_TOKEN = -1
"""Result for a row whose logits are not finite."""
UNDECIDED = -2
"""Result of the native op where rounding could change the token."""

_ROWS = 16  # sorted at once: with a vocabulary of 128k they and their sums take 100 MB


def greedy(logits: Tensor) -> Tensor:
    """Returns the most likely token of each row of ``[R, vocab]``, or `NO_TOKEN`: ``[R]`` int64."""
    best, tokens = logits.max(-1)
    return torch.where(best.isfinite(), tokens, NO_TOKEN)


def sample(
    logits: Tensor,
    greedy: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniform: Tensor,
) -> Tensor:
    """Returns the token of each row, ``[R]`` int64.

    Args:
        logits: ``[R, vocab]``, any float dtype.
        greedy: ``[R]``, see `greedy`.
        temperature: ``[R]`` float64; 0: greedy.
        top_k: ``[R]`` int64, 1 or more.
        top_p, min_p: ``[R]`` float64, as in `compiled_attn.engine.SamplingParams`.
        uniform: ``[R]`` float64 in [0, 1), position in the cumulative weights.
    """
    settings = temperature, top_k, top_p, min_p, uniform
    temperature, top_k, top_p, min_p, uniform = (each.unsqueeze(1) for each in settings)
    values, tokens = logits.sort(dim=-1, descending=True, stable=True)
    values = values.double()
    is_sampled = (temperature > 0) & (greedy >= 0).unsqueeze(1)
    weights = ((values - values[:, :1]) / torch.where(is_sampled, temperature, 1.0)).exp()
    rank = torch.arange(logits.shape[1], device=logits.device)
    weights = torch.where(rank < top_k, weights, 0.0)
    sums = weights.cumsum(1)
    # A token stays unless more likely ones reach top_p: the first one always stays.
    stays = (sums - weights < top_p * sums[:, -1:]) & (weights >= min_p)
    weights = torch.where(stays, weights, 0.0)
    sums = weights.cumsum(1)
    position = (sums <= uniform * sums[:, -1:]).sum(1, keepdim=True)
    last = (weights > 0).sum(1, keepdim=True) - 1
    sampled = tokens.gather(1, position.minimum(last).clamp_min(0))
    return torch.where(is_sampled, sampled, greedy.unsqueeze(1)).squeeze(1)


def reference(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniform: Tensor,
) -> Tensor:
    """The op in Python, see `sample`; sorts only rows that are sampled."""
    best = greedy(logits)
    at = (temperature > 0).nonzero().squeeze(1)
    settings = temperature, top_k, top_p, min_p, uniform
    for some in at.split(_ROWS):
        best[some] = sample(logits[some], best[some], *(each[some] for each in settings))
    return best


def fake(logits: Tensor, temperature: Tensor, top_k: Tensor, *_: Tensor) -> Tensor:
    """Returns an empty result."""
    return torch.empty_like(top_k)
