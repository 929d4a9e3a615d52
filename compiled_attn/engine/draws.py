"""The sampler: the next token of each row, greedy or drawn, reproducible per request."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from compiled_attn.engine.logit_rules import LogitRules, shaped
from compiled_attn.engine.ranking import RankedRows
from compiled_attn.engine.running_sum import RunningSum
from compiled_attn.engine.sampling import SamplingParams
from compiled_attn.engine.uniform import uniforms

__all__ = ["NOT_FINITE", "Draw", "drawn_rows", "sample", "sample_rows"]

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
    ranked = RankedRows(logits)
    best, tokens = ranked.best()
    values, rows = best.tolist(), [*tokens.tolist()]
    if not math.isfinite(sum(values)):
        rows = [t if math.isfinite(v) else NOT_FINITE for v, t in zip(values, rows, strict=True)]
    finite = [draw for draw in draws if rows[draw.row] is not NOT_FINITE]
    changed = [draw for draw in finite if draw.params.changes_logits]
    random = [d for d in finite if d.params.temperature and not d.params.changes_logits]
    for draw, token in zip(changed, _drawn(logits, changed), strict=True):
        rows[draw.row] = token
    for draw, token in zip(random, _drawn(ranked, random), strict=True):
        rows[draw.row] = token
    return rows


def _drawn(source: Tensor | RankedRows, draws: Sequence[Draw]) -> Sequence[int | str]:
    """All at once, or, where that fails, one by one: whatever fails is one request's alone.

    Args:
        source: logits that the rules of the draws change, or such as they are.
        draws: from rows of these.
    """
    if not draws:
        return []
    try:
        return _tokens(source, draws) if isinstance(source, RankedRows) else _shaped(source, draws)
    except Exception as error:
        if len(draws) == 1:
            return [f"sampling failed: {type(error).__name__}: {error}"]
        return [token for draw in draws for token in _drawn(source, [draw])]


def _shaped(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """The tokens of rows after their rules have changed a copy of them."""
    rules = [draw.rules for draw in draws if draw.rules is not None]
    at = [draw.row for draw in draws]
    own = shaped(logits, at, rules, [draw.text for draw in draws])
    ranked = RankedRows(own)
    best, tokens = ranked.best()
    if not all(math.isfinite(value) for value in best.tolist()):
        raise ValueError(
            "expected a token that may be drawn, got none: lower min_tokens, or mend the grammar, "
            "which cannot go on here"
            if any(rule.constraint for rule in rules)
            else "expected a token that may be drawn, got none: lower min_tokens"
        )
    drawn: list[int] = tokens.tolist()
    random = [draw._replace(row=n) for n, draw in enumerate(draws) if draw.params.temperature]
    for draw, token in zip(random, _tokens(ranked, random), strict=True):
        drawn[draw.row] = token
    return drawn


def _tokens(ranked: RankedRows, draws: Sequence[Draw]) -> list[int]:
    """Each the token at a uniform place of the running sum of its row, the most likely first."""
    if not draws:
        return []
    uniform = uniforms([draw.params.seed or 0 for draw in draws], [draw.step for draw in draws])
    few = np.array([ranked.is_few(draw.params.top_k) for draw in draws])
    tokens = np.zeros(len(draws), np.int64)
    for at, of_some in ((np.flatnonzero(few), _of_few), (np.flatnonzero(~few), _of_all)):
        if len(at):
            tokens[at] = of_some(ranked, [draws[n] for n in at.tolist()], uniform[at])
    drawn: list[int] = tokens.tolist()
    return drawn


def _of_few(
    ranked: RankedRows, draws: Sequence[Draw], uniform: NDArray[np.float64]
) -> NDArray[np.int64]:
    """The tokens of rows of which only the first few are kept, all rows at once."""
    params = [draw.params for draw in draws]
    kept = np.array([each.top_k or ranked.vocab for each in params])
    values, tokens = ranked.first(np.array([draw.row for draw in draws]), int(kept.max()))
    temperature = np.array([[each.temperature] for each in params])
    with np.errstate(over="ignore"):  # the largest is 0: their powers never overflow
        weights = np.exp((values - values[:, :1]) / temperature)
    weights[np.arange(weights.shape[1]) >= kept[:, None]] = 0
    # Running sums, as their bits don't depend on how many tokens another row keeps.
    sums = weights.cumsum(1)
    # A token stays if the more likely ones don't reach top_p yet: the first one always stays.
    reached = np.array([[each.top_p] for each in params]) * sums[:, -1:]
    weights[sums - weights >= reached] = 0
    weights[weights < np.array([[each.min_p] for each in params])] = 0  # of the most likely, 1
    sums = weights.cumsum(1)
    place = (sums <= uniform[:, None] * sums[:, -1:]).sum(1)
    last = np.count_nonzero(weights, axis=1) - 1
    drawn: NDArray[np.int64] = tokens[np.arange(len(draws)), np.minimum(place, last)]
    return drawn


def _of_all(ranked: RankedRows, draws: Sequence[Draw], uniform: NDArray[np.float64]) -> list[int]:
    """The tokens of rows of which any number is kept, from the running sum of each row."""
    ordered, tokens = RunningSum(ranked.vocab), []
    for draw, number in zip(draws, uniform.tolist(), strict=True):
        values = ranked.row(draw.row)
        tokens.append(ordered.token(values, ranked.head(draw.row, values), draw.params, number))
    return tokens
