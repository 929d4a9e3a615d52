"""From logits to the next token: greedy, temperature, top-k, top-p, reproducible per request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

__all__ = ["SamplingParams", "sample"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is continued.

    Args:
        max_new_tokens: tokens to generate at most (>= 1).
        temperature: 0 takes the most likely token; otherwise logits are divided by it.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of most likely tokens with at least this probability (0 < p <=
            1).
        seed: a request draws the same numbers whatever else is in its batch, and after a
            preemption.
        stop_token_ids: tokens that end the request; they are part of the result.
        ignore_eos: go on after the model's end-of-sequence token.

    Raises:
        ValueError: a value outside its range.
    """

    max_new_tokens: int = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        limits = (
            ("max_new_tokens", self.max_new_tokens >= 1, ">= 1"),
            ("temperature", 0.0 <= self.temperature < float("inf"), ">= 0 and finite"),
            ("top_k", self.top_k >= 0, ">= 0"),
            ("top_p", 0.0 < self.top_p <= 1.0, "in (0, 1]"),
            ("seed", 0 <= self.seed < 2**64, "in 0..2**64 - 1"),
        )
        for name, holds, wanted in limits:
            if not holds:
                raise ValueError(f"expected {name} {wanted}, got {getattr(self, name)}")


def sample(logits: Tensor, params: Sequence[SamplingParams], steps: Sequence[int]) -> list[int]:
    """The next token of each row.

    Args:
        logits: ``[R, vocab]``, any float dtype.
        params: R of them, one per row.
        steps: how many tokens each row's request has generated so far: the counter of its draws.
    """
    greedy: list[int] = logits.argmax(-1).tolist()
    for row, (param, step) in enumerate(zip(params, steps, strict=True)):
        if param.temperature > 0:
            greedy[row] = _draw(logits[row].float(), param, step)
    return greedy


def _draw(logits: Tensor, params: SamplingParams, step: int) -> int:
    if not torch.isfinite(logits.max()):
        raise ValueError("expected finite logits to sample from, got NaN or inf: check the model")
    scaled = (logits - logits.max()) / params.temperature  # the largest is 0: nothing overflows
    ordered, tokens = torch.sort(scaled, descending=True, stable=True)
    if params.top_k:
        ordered = ordered[: params.top_k]
    probabilities = torch.softmax(ordered.double(), -1)
    before = probabilities.cumsum(-1) - probabilities
    # A token stays if the more likely ones don't reach top_p yet: the first one always stays.
    kept = probabilities[before < params.top_p].cumsum(-1)
    uniform = np.random.Generator(np.random.Philox(key=params.seed, counter=step)).random()
    place = int(torch.searchsorted(kept, uniform * float(kept[-1]), right=True))
    return int(tokens[min(place, len(kept) - 1)])
