"""The sampler: the next token of each row, greedy or random, reproducible per request; with
log-probabilities if requested.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compiled_attn.engine.logit_rules import LogitRules, shaped
from compiled_attn.engine.logprobs import RowResult, logprobs_of
from compiled_attn.engine.sampling import SamplingParams
from compiled_attn.engine.sampling_rows import SamplingRows
from compiled_attn.engine.scheduler import ScheduledStep
from compiled_attn.ops import load
from compiled_attn.ops.sampling import NATIVE_DTYPES, NO_TOKEN, UNDECIDED, reference

__all__ = [
    "NOT_FINITE",
    "SampleRequest",
    "add_logprobs",
    "logits_needed",
    "rows_of",
    "sample_requests",
    "sample_step",
]

NOT_FINITE = "expected finite logits to sample from, got NaN or inf: check the model"

_NOT_FINITE_ROW = RowResult(error=NOT_FINITE)


class SampleRequest(NamedTuple):
    """A row whose token is not simply the most likely one.

    Args:
        step: how many tokens were generated before it.
        rules: change its logits before that; None: nothing does.
        text: the tokens before it.
    """

    row: int
    params: SamplingParams
    step: int
    rules: LogitRules | None = None
    text: Sequence[int] = ()


def sample_requests(logits: Tensor, requests: Sequence[SampleRequest]) -> list[RowResult]:
    """Samples the rows of ``requests``; all others yield their most likely token."""
    own = [request for request in requests if not request.params.changes_logits]
    try:
        rows = _tokens(logits, own)
    except Exception:
        rows = _tokens(logits, [])
        for request, row in zip(own, _each_or_error(partial(_by_rows, logits), own), strict=True):
            rows[request.row] = row
    changed = [r for r in requests if r.params.changes_logits and rows[r.row].token is not None]
    shaped_rows = _each_or_error(partial(_shaped, logits), changed)
    for request, row in zip(changed, shaped_rows, strict=True):
        rows[request.row] = row
    return rows


def _each_or_error(
    sample_all: Callable[[Sequence[SampleRequest]], Sequence[RowResult]],
    requests: Sequence[SampleRequest],
) -> Sequence[RowResult]:
    """Samples all at once, or, if that fails, one by one, so that only failing ones get errors."""
    if not requests:
        return []
    try:
        return sample_all(requests)
    except Exception as error:
        if len(requests) == 1:
            return [RowResult(error=f"sampling failed: {type(error).__name__}: {error}")]
        return [row for request in requests for row in _each_or_error(sample_all, [request])]


def _by_rows(logits: Tensor, requests: Sequence[SampleRequest]) -> list[RowResult]:
    return [_tokens(logits[each.row, None], [each._replace(row=0)])[0] for each in requests]


def _shaped(logits: Tensor, requests: Sequence[SampleRequest]) -> list[RowResult]:
    """Samples rows after their rules have changed a copy of them."""
    rules = [request.rules for request in requests if request.rules is not None]
    at = [request.row for request in requests]
    own = shaped(logits, at, rules, [request.text for request in requests])
    rows = _tokens(own, [request._replace(row=n) for n, request in enumerate(requests)])
    if any(row.token is None for row in rows):
        raise ValueError(
            "expected a token that may be sampled, got none: lower min_tokens, or fix the grammar, "
            "which cannot continue here"
            if any(rule.constraint for rule in rules)
            else "expected a token that may be sampled, got none: lower min_tokens"
        )
    return rows


def _tokens(logits: Tensor, requests: Sequence[SampleRequest]) -> list[RowResult]:
    settings = _settings(logits, requests) if requests else _greedy_rows(len(logits))
    return rows_of(_op_tokens(logits, settings))


def rows_of(tokens: Sequence[int]) -> list[RowResult]:
    """The results of the op's tokens, of which some may be `NO_TOKEN`."""
    return [_NOT_FINITE_ROW if token == NO_TOKEN else RowResult(token) for token in tokens]


def _settings(logits: Tensor, requests: Sequence[SampleRequest]) -> SamplingRows:
    at, params = [request.row for request in requests], [request.params for request in requests]
    return SamplingRows.of(at, params, [request.step for request in requests], *logits.shape)


@lru_cache(maxsize=64)
def _greedy_rows(rows: int) -> SamplingRows:
    return SamplingRows.padding(rows)


@cache
def _op() -> Any:
    load()  # the same for all of a process
    return torch.ops.compiled_attn.sample_tokens


def _op_tokens(logits: Tensor, settings: SamplingRows) -> list[int]:
    """Samples with the op, or with its reference where the op does not support a row."""
    if logits.device.type != "cpu" or logits.dtype not in NATIVE_DTYPES:
        tokens = reference(logits, *(each.to(logits.device) for each in settings)).tolist()
    else:
        rows = logits if logits.stride(1) == 1 else logits.contiguous()
        tokens = _op()(rows, *settings).tolist()
    if UNDECIDED in tokens:
        at = [row for row, token in enumerate(tokens) if token == UNDECIDED]
        known = reference(logits[at], *(each[at] for each in settings)).tolist()
        for row, token in zip(at, known, strict=True):
            tokens[row] = token
    found: list[int] = tokens
    return found


def logits_needed(step: ScheduledStep) -> list[int] | None:
    """Counts the rows of logits that each sequence needs; None: one each.

    That is one, sampled or not, as it shows whether what was computed is finite; and all while its
    prompt gets log-probabilities, or with a draft.
    """
    if step.drafts:
        return [1 + len(part.draft) for part in step]
    if not step.special:
        return None
    return [
        count if sequence.scores_prompt else 1
        for sequence, count in zip(step.sequences, step.counts, strict=True)
    ]


def sample_step(logits: Tensor, step: ScheduledStep, needed: NDArray[np.int64]) -> list[RowResult]:
    """Samples the token after each sequence.

    Args:
        logits: ``[>= sum(needed), vocab]``, those of the first sequence first.
        step: what was computed.
        needed: ``[R]``, see `logits_needed`.
    """
    ends = np.cumsum(needed)
    last = logits[: len(ends)] if ends[-1] == len(ends) else logits[ends - 1]
    if not step.special:
        return sample_requests(last, [])
    ready = [row for row in step.special if step[row].needs_logits]
    requests = [
        SampleRequest(row, each.sampling, step[row].generated, each.rules, each.tokens)
        for row, each in ((row, step.sequences[row]) for row in ready)
    ]
    rows = sample_requests(last, requests)
    counts = [(row, step.sequences[row].sampling.logprobs) for row in ready]
    add_logprobs(last, rows, counts)
    for row in step.special:
        if step.sequences[row].scores_prompt and rows[row].token is not None:
            first = int(ends[row] - needed[row])
            rows[row] = _with_prompt(rows[row], logits[first:], step, row)
    return rows


def add_logprobs(
    logits: Tensor, rows: list[RowResult], counts: Iterable[tuple[int, int | None]]
) -> None:
    """Adds log-probabilities to some of the rows: of the token and of so many most likely ones;
    None: none.
    """
    chosen = [
        (row, token, count)
        for row, count in counts
        if count is not None and (token := rows[row].token) is not None
    ]
    if chosen:
        at, tokens, counts = zip(*chosen, strict=True)
        for row, logprobs in zip(at, logprobs_of(logits[[*at]], tokens, counts), strict=True):
            rows[row] = rows[row]._replace(logprobs=logprobs)


def _with_prompt(result: RowResult, logits: Tensor, step: ScheduledStep, row: int) -> RowResult:
    """Adds the log-probabilities of the prompt tokens that follow those of this step."""
    sequence, count, start, _ = step[row]
    after = sequence.tokens[start + 1 : min(start + 1 + count, sequence.prompt_len)]
    if not after:
        return result
    most = sequence.sampling.prompt_logprobs or 0
    found = logprobs_of(logits[: len(after)], after, [most] * len(after))
    if any(math.isnan(each.logprob) for each in found):
        return _NOT_FINITE_ROW
    return result._replace(prompt_logprobs=tuple(found))
