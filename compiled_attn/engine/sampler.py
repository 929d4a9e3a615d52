"""The sampler: the next token of each row, greedy or drawn, reproducible per request; with
log-probabilities where a request wants them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compiled_attn.engine.draw_rows import DrawRows
from compiled_attn.engine.logit_rules import LogitRules, shaped
from compiled_attn.engine.logprobs import ScoredToken, TokenLogprobs, logprobs_of
from compiled_attn.engine.sampling import SamplingParams
from compiled_attn.engine.scheduler import ScheduledStep
from compiled_attn.ops import load
from compiled_attn.ops.sampling import NATIVE_DTYPES, NO_TOKEN, UNDECIDED, reference

__all__ = ["NOT_FINITE", "Draw", "drawn_rows", "logits_wanted", "sample", "sample_rows", "sampled"]

NOT_FINITE = "expected finite logits to sample from, got NaN or inf: check the model"


def sample(
    logits: Tensor,
    params: Sequence[SamplingParams],
    steps: Sequence[int],
    texts: Sequence[Sequence[int]] | None = None,
) -> list[int]:
    """The next token of each row.

    Args:
        logits: ``[R, vocab]``, any float dtype.
        params: R of them, one per row.
        steps: how many tokens each row's request has generated so far: the counter of its draws.
        texts: the tokens of each row's request so far, of which the last are those generated; for
            penalties. None: they are not known.

    Raises:
        ValueError: a row that cannot be sampled, such as one without a finite maximum.
    """
    rows = sample_rows(logits, params, steps, texts)
    for row in rows:
        if isinstance(row, str):
            raise ValueError(row)
    return [int(row) for row in rows]


def sample_rows(
    logits: Tensor,
    params: Sequence[SamplingParams | None],
    steps: Sequence[int],
    texts: Sequence[Sequence[int]] | None = None,
) -> list[int | str]:
    """The next token of each row, or why there is none: a row never stops another.

    Args:
        logits: ``[R, vocab]``, any float dtype. A row whose maximum is NaN or infinite has no
            token.
        params: R of them; None: the row is only looked at, and its most likely token given.
        steps, texts: as in `sample`.

    Raises:
        ValueError: settings have a grammar.
    """
    if any(param is not None and param.grammar for param in params):
        raise ValueError("expected settings without a grammar, got one: an engine serves it")
    rows = enumerate(zip(params, steps, texts or [()] * len(steps), strict=True))
    draws = [
        Draw(row, param, step, LogitRules(param, len(text) - step, param.stop_token_ids), text)
        for row, (param, step, text) in rows
        if param is not None
    ]
    return drawn_rows(logits, draws)


class Draw(NamedTuple):
    """A row whose token is not simply the most likely one.

    Args:
        row: of the logits.
        params: how the token is drawn.
        step: how many others were generated before it.
        rules: what changes its logits before that; None where nothing does.
        text: the tokens before it.
    """

    row: int
    params: SamplingParams
    step: int
    rules: LogitRules | None = None
    text: Sequence[int] = ()


def drawn_rows(logits: Tensor, draws: Sequence[Draw]) -> list[int | str]:
    """`sample_rows`, where rows that no draw is for give their most likely token."""
    own = [draw for draw in draws if not draw.params.changes_logits]
    try:
        rows = _tokens(logits, own)
    except Exception:
        rows = _tokens(logits, [])
        for draw, token in zip(own, _each_or_why(partial(_by_rows, logits), own), strict=True):
            rows[draw.row] = token
    changed = [d for d in draws if d.params.changes_logits and rows[d.row] is not NOT_FINITE]
    for draw, token in zip(changed, _each_or_why(partial(_shaped, logits), changed), strict=True):
        rows[draw.row] = token
    return rows


def _each_or_why(
    tokens_of: Callable[[Sequence[Draw]], Sequence[int | str]], draws: Sequence[Draw]
) -> Sequence[int | str]:
    """All at once, or, where that fails, one by one: whatever fails is one request's alone."""
    if not draws:
        return []
    try:
        return tokens_of(draws)
    except Exception as error:
        if len(draws) == 1:
            return [f"sampling failed: {type(error).__name__}: {error}"]
        return [token for draw in draws for token in _each_or_why(tokens_of, [draw])]


def _by_rows(logits: Tensor, draws: Sequence[Draw]) -> list[int | str]:
    return [_tokens(logits[each.row, None], [each._replace(row=0)])[0] for each in draws]


def _shaped(logits: Tensor, draws: Sequence[Draw]) -> list[int | str]:
    """The tokens of rows after their rules have changed a copy of them."""
    rules = [draw.rules for draw in draws if draw.rules is not None]
    at = [draw.row for draw in draws]
    own = shaped(logits, at, rules, [draw.text for draw in draws])
    tokens = _tokens(own, [draw._replace(row=n) for n, draw in enumerate(draws)])
    if NOT_FINITE in tokens:
        raise ValueError(
            "expected a token that may be drawn, got none: lower min_tokens, or mend the grammar, "
            "which cannot go on here"
            if any(rule.constraint for rule in rules)
            else "expected a token that may be drawn, got none: lower min_tokens"
        )
    return tokens


def _tokens(logits: Tensor, draws: Sequence[Draw]) -> list[int | str]:
    """The tokens of all rows of the logits as they are, the most likely ones but for the draws."""
    settings = _settings(logits, draws) if draws else _no_draws(len(logits))
    return [NOT_FINITE if token == NO_TOKEN else token for token in _drawn(logits, settings)]


def _settings(logits: Tensor, draws: Sequence[Draw]) -> DrawRows:
    at, params = [draw.row for draw in draws], [draw.params for draw in draws]
    return DrawRows.of(at, params, [draw.step for draw in draws], *logits.shape)


@lru_cache(maxsize=64)
def _no_draws(rows: int) -> DrawRows:
    return DrawRows.padding(rows)


@cache
def _op() -> Any:
    load()  # the same for all of a process
    return torch.ops.compiled_attn.sample_tokens


def _drawn(logits: Tensor, settings: DrawRows) -> list[int]:
    """The tokens of the op, and of its definition where the op has none."""
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
