"""The tokens of a step from its logits, with log-probabilities where a request wants them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from compiled_attn.engine.draws import NOT_FINITE, Draw, drawn_rows
from compiled_attn.engine.logprobs import ScoredToken, TokenLogprobs, logprobs_of
from compiled_attn.engine.scheduler import ScheduledStep

__all__ = ["logits_wanted", "sampled"]


def logits_wanted(step: ScheduledStep) -> list[int] | None:
    """Of how many of its last tokens each sequence needs logits: of one, sampled or not, as they
    show whether what was computed is finite; of all where its prompt gets log-probabilities.
    None: one each.
    """
    if not step.special:
        return None
    return [
        count if sequence.scores_prompt else 1
        for sequence, count in zip(step.sequences, step.counts, strict=True)
    ]


def sampled(
    logits: Tensor, step: ScheduledStep, wanted: NDArray[np.int64]
) -> list[int | str | ScoredToken]:
    """The token after each sequence, or why there is none.

    Args:
        logits: ``[>= sum(wanted), vocab]``, those of the first sequence first.
        step: what was computed.
        wanted: ``[R]``, see `logits_wanted`.
    """
    ends = np.cumsum(wanted)
    last = logits[: len(ends)] if ends[-1] == len(ends) else logits[ends - 1]
    if not step.special:
        return [*drawn_rows(last, [])]
    ready = [row for row in step.special if step[row].wants_logits]
    draws = [
        Draw(row, each.sampling, step[row].generated, each.rules, each.tokens)
        for row, each in ((row, step.sequences[row]) for row in ready)
    ]
    rows: list[int | str | ScoredToken] = [*drawn_rows(last, draws)]
    for row, logprobs in _of_tokens(last, step, ready, rows):
        rows[row] = ScoredToken(logprobs.token, logprobs)
    for row in step.special:
        sequence = step.sequences[row]
        token = rows[row]
        if sequence.scores_prompt and not isinstance(token, str):
            first = int(ends[row] - wanted[row])
            rows[row] = _with_prompt(token, logits[first:], step, row)
    return rows


def _of_tokens(
    logits: Tensor,
    step: ScheduledStep,
    ready: Sequence[int],
    rows: Sequence[int | str | ScoredToken],
) -> list[tuple[int, TokenLogprobs]]:
    """Rows whose tokens get log-probabilities, with these."""
    chosen = [
        (row, token, count)
        for row in ready
        if isinstance(token := rows[row], int)
        and (count := step.sequences[row].sampling.logprobs) is not None
    ]
    if not chosen:
        return []
    at, tokens, counts = zip(*chosen, strict=True)
    return [*zip(at, logprobs_of(logits[[*at]], tokens, counts), strict=True)]


def _with_prompt(
    token: int | ScoredToken, logits: Tensor, step: ScheduledStep, row: int
) -> ScoredToken | str:
    """A token with the log-probabilities of the tokens of the prompt after those of this step."""
    sequence, count, start = step[row]
    after = sequence.tokens[start + 1 : min(start + 1 + count, sequence.prompt_len)]
    scored = token if isinstance(token, ScoredToken) else ScoredToken(token)
    if not after:
        return scored
    most = sequence.sampling.prompt_logprobs or 0
    found = logprobs_of(logits[: len(after)], after, [most] * len(after))
    if any(math.isnan(each.logprob) for each in found):
        return NOT_FINITE
    return scored._replace(prompt=tuple(found))
