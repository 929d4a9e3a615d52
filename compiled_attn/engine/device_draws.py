"""The sampler as a graph of a device: the settings of all rows are tensors, nothing is waited for.

It draws what `compiled_attn.engine.draws` draws on the host: from the same running sum, in float64,
at the same uniform number of each request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from compiled_attn.engine.scheduler import ScheduledStep
from compiled_attn.engine.uniform import uniforms

__all__ = ["NO_TOKEN", "DrawRows", "drawn_tokens", "likely_tokens"]

NO_TOKEN = -1
"""Stands where a row has no token, as its logits are not finite."""


class DrawRows(NamedTuple):
    """How the token of each row is drawn, ``[R]`` each.

    Args:
        temperature: float64; 0: the most likely token is taken.
        top_k: int64; how many of the most likely are kept.
        top_p, min_p: float64, as in `compiled_attn.engine.SamplingParams`.
        uniform: float64, the place in the running sum of what is kept.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    uniform: Tensor

    @classmethod
    def of(cls, step: ScheduledStep, rows: int, vocab: int) -> DrawRows:
        """Those of a step, whose settings do nothing else to the logits, padded to so many rows."""
        drawn = cls.padding(rows)
        at, parts = step.special, [step[at] for at in step.special]
        wanted = [part.sequence.sampling for part in parts]
        uniform = uniforms([each.seed or 0 for each in wanted], [part.generated for part in parts])
        drawn.temperature[at] = _doubles([each.temperature for each in wanted])
        drawn.top_k[at] = torch.tensor([min(each.top_k or vocab, vocab) for each in wanted])
        drawn.top_p[at] = _doubles([each.top_p for each in wanted])
        drawn.min_p[at] = _doubles([each.min_p for each in wanted])
        drawn.uniform[at] = torch.from_numpy(np.ascontiguousarray(uniform))
        return drawn

    @classmethod
    def padding(cls, rows: int) -> DrawRows:
        """Rows whose most likely token is taken."""
        ones, zeros = (torch.full((rows,), n, dtype=torch.float64) for n in (1.0, 0.0))
        return cls(zeros, ones.long(), ones, zeros.clone(), zeros.clone())


def likely_tokens(logits: Tensor) -> Tensor:
    """The most likely token of each row of ``[R, vocab]``, or `NO_TOKEN`: ``[R]`` int64."""
    best, tokens = logits.max(-1)
    return torch.where(best.isfinite(), tokens, NO_TOKEN)


def drawn_tokens(logits: Tensor, likely: Tensor, *settings: Tensor) -> Tensor:
    """The token of each row, ``[R]`` int64: drawn, or the most likely one.

    Args:
        logits: ``[R, vocab]``, any float dtype.
        likely: ``[R]``, of `likely_tokens`.
        settings: the fields of a `DrawRows`.
    """
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
    drawn = tokens.gather(1, place.minimum(last).clamp_min(0))
    return torch.where(is_drawn, drawn, likely.unsqueeze(1)).squeeze(1)


def _doubles(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)
