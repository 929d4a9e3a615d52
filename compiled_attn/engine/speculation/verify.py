"""Accepts or refuses the tokens of drafts.

Each position after a draft token is sampled as it would be without drafts: from the model's own
distribution, with the request's settings and the random number of that position. A draft token is
accepted if it is the one that was sampled. So it is accepted with its probability in the model, and
a token in its place has the distribution without it: rejection sampling (Leviathan et al., "Fast
Inference from Transformers via Speculative Decoding", ICML 2023) for drafts that are not random.
Besides the distribution, the tokens of a seed are the same as without drafts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from compiled_attn.engine.logprobs import RowResult
from compiled_attn.engine.sampler import (
    SampleRequest,
    add_logprobs,
    sample_requests,
    sample_step,
)
from compiled_attn.engine.scheduler import ScheduledStep, ScheduledTokens

__all__ = ["accepted", "requests_of_rows", "sampled"]


def sampled(logits: Tensor, step: ScheduledStep, needed: NDArray[np.int64]) -> list[RowResult]:
    """Samples the token after each sequence, and those after the accepted tokens of its draft.

    Args:
        logits, step, needed: see `sample_step`.
    """
    if not step.drafts:
        return sample_step(logits, step, needed)
    first = np.cumsum(needed) - needed
    logits = logits[: int(needed.sum())]
    parts = dict(zip(first.tolist(), step, strict=True))
    ready = {row: part for row, part in parts.items() if part.needs_logits}
    rows = sample_requests(logits, requests_of_rows(ready))
    # Rules of logits depend on the tokens before, so they see one accepted token after the other.
    ruled = {row: part for row, part in ready.items() if part.sequence.rules is not None}
    place = 0
    while ruled:
        _sample_ruled(logits, rows, ruled, place)
        ruled = {row: part for row, part in ruled.items() if _matches(rows, row, part) > place}
        place += 1
    counts = [
        (row + place, part.sequence.sampling.logprobs)
        for row, part in ready.items()
        if not part.sequence.is_plain
        for place in range(1 + _matches(rows, row, part))
    ]
    add_logprobs(logits, rows, counts)
    return accepted(rows, parts)


def requests_of_rows(parts: Mapping[int, ScheduledTokens]) -> list[SampleRequest]:
    """Returns the settings of the rows that are sampled without rules.

    Args:
        parts: sequences by their first row.
    """
    return [
        SampleRequest(row + place, part.sequence.sampling, part.generated + place)
        for row, part in parts.items()
        if not part.sequence.is_plain and part.sequence.rules is None
        for place in range(1 + len(part.draft))
    ]


def accepted(rows: Sequence[RowResult], parts: Mapping[int, ScheduledTokens]) -> list[RowResult]:
    """Returns the result of each sequence: up to the first token that its draft does not have.

    Args:
        rows: results of all rows.
        parts: sequences by their first row.
    """
    results = []
    for row, part in parts.items():
        count = _matches(rows, row, part)
        found = [rows[row + place]._replace(draft=place + 1) for place in range(count)]
        found.append(rows[row + count])
        results.append(found[0]._replace(more=tuple(found[1:])))
    return results


def _matches(rows: Sequence[RowResult], row: int, part: ScheduledTokens) -> int:
    """How many tokens of a draft are those that were sampled."""
    for place, token in enumerate(part.draft):
        if rows[row + place].token != token:
            return place
    return len(part.draft)


def _sample_ruled(
    logits: Tensor, rows: list[RowResult], parts: Mapping[int, ScheduledTokens], place: int
) -> None:
    """Samples the rows at a place of the drafts, after the accepted tokens before it."""
    requests = [
        SampleRequest(
            number,
            part.sequence.sampling,
            part.generated + place,
            part.sequence.rules,
            [*part.sequence.tokens, *part.draft[:place]],
        )
        for number, part in enumerate(parts.values())
    ]
    at = [row + place for row in parts]
    for row, result in zip(at, sample_requests(logits[at], requests), strict=True):
        rows[row] = result
