"""The sampler: the next token of each row, greedy or drawn, reproducible per request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

from torch import Tensor

from compiled_attn.engine.draw_rows import DrawRows
from compiled_attn.engine.logit_rules import LogitRules, shaped
from compiled_attn.engine.sampling import SamplingParams
from compiled_attn.engine.uniform import uniforms
from compiled_attn.ops import load
from compiled_attn.ops.drawn_tokens import NATIVE_DTYPES, NO_TOKEN, UNDECIDED, reference

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
    uniform = uniforms([each.seed or 0 for each in params], [draw.step for draw in draws])
    return DrawRows.of(at, params, uniform, *logits.shape)


@lru_cache(maxsize=64)
def _no_draws(rows: int) -> DrawRows:
    return DrawRows.padding(rows)


def _drawn(logits: Tensor, settings: DrawRows) -> list[int]:
    """The tokens of the op, and of its definition where the op has none."""
    if logits.device.type != "cpu" or logits.dtype not in NATIVE_DTYPES:
        tokens = reference(logits, *(each.to(logits.device) for each in settings)).tolist()
    else:
        rows = logits if logits.stride(1) == 1 else logits.contiguous()
        tokens = load().drawn_tokens(rows, *settings).tolist()
    if UNDECIDED in tokens:
        at = [row for row, token in enumerate(tokens) if token == UNDECIDED]
        known = reference(logits[at], *(each[at] for each in settings)).tolist()
        for row, token in zip(at, known, strict=True):
            tokens[row] = token
    found: list[int] = tokens
    return found
