"""Log-probabilities of tokens under the model's own logits, before any setting changes these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from compiled_attn.engine.ranking import most_likely

__all__ = ["ScoredToken", "TokenLogprobs", "logprobs_of"]


class TokenLogprobs(NamedTuple):
    """The log-probability of a token, and the most likely tokens at its place.

    Args:
        token: its id.
        logprob: natural logarithm of its probability.
        top: ids and log-probabilities of the most likely tokens, the likeliest first; of equal
            ones the lower id.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class ScoredToken(NamedTuple):
    """A token of a step with the log-probabilities that its request wants.

    Args:
        token: its id.
        logprobs: its own; None where they are not wanted.
        prompt: of the tokens of the prompt that follow those which the step computed.
    """

    token: int
    logprobs: TokenLogprobs | None = None
    prompt: tuple[TokenLogprobs, ...] = ()


def logprobs_of(
    logits: Tensor, tokens: Sequence[int], counts: Sequence[int]
) -> list[TokenLogprobs]:
    """The log-probability of a token of each row, and of the most likely ones, all rows at once.

    Args:
        logits: ``[R, vocab]``, any float dtype.
        tokens: R ids.
        counts: how many of the most likely ones are wanted of each row.
    """
    rows = torch.arange(len(logits), device=logits.device)
    at = torch.tensor(tokens, device=logits.device)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    total = wide.logsumexp(1)
    own = (wide[rows, at] - total).tolist()
    values, ids = most_likely(wide, max(1, *counts))
    logprobs = (values - total.double().cpu().numpy()[:, None]).tolist()
    return [
        TokenLogprobs(token, logprob, tuple(zip(of_row[:count], each[:count], strict=True)))
        for token, logprob, count, of_row, each in zip(
            tokens, own, counts, ids.tolist(), logprobs, strict=True
        )
    ]
