"""The sampler: greedy, temperature, top-k, top-p, reproducible per request."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from compiled_attn.engine.ranking import RankedRows, RunningSum
from compiled_attn.engine.uniform import uniforms

__all__ = ["NOT_FINITE", "Draw", "SamplingParams", "drawn_rows", "sample", "sample_rows"]

NOT_FINITE = "expected finite logits to sample from, got NaN or inf: check the model"


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
            preemption. None: the engine draws a seed for each request, which its result names.
        stop_token_ids: tokens that end the request; they are part of the result.
        ignore_eos: go on after the model's end-of-sequence token.

    Raises:
        ValueError: a value outside its range, or of another type.
    """

    max_new_tokens: int = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        self._settle("max_new_tokens", _integer, lambda n: n >= 1, "an integer >= 1")
        self._settle("temperature", _number, lambda t: 0 <= t < math.inf, "a finite number >= 0")
        self._settle("top_k", _integer, lambda k: k >= 0, "an integer >= 0")
        self._settle("top_p", _number, lambda p: 0 < p <= 1, "a number in (0, 1]")
        if self.seed is not None:
            self._settle("seed", _integer, lambda s: 0 <= s < 2**64, "None or in 0..2**64 - 1")
        self._settle("stop_token_ids", _integers, lambda _: True, "a tuple of token ids")
        self._settle("ignore_eos", _flag, lambda _: True, "True or False")

    def seeded(self) -> SamplingParams:
        """The same with a seed, drawn if there is none."""
        return self if self.seed is not None else replace(self, seed=secrets.randbits(64))

    def _settle(
        self, name: str, kind: Callable[[Any], Any], holds: Callable[[Any], bool], wanted: str
    ) -> None:
        given = getattr(self, name)
        value = kind(given)
        if value is None or not holds(value):
            text = repr(given)
            text = text if len(text) <= 80 else f"{text[:80]}..."
            raise ValueError(f"expected {name}: {wanted}, got {text}")
        object.__setattr__(self, name, value)


def sample(logits: Tensor, params: Sequence[SamplingParams], steps: Sequence[int]) -> list[int]:
    """The next token of each row.

    Args:
        logits: ``[R, vocab]``, any float dtype.
        params: R of them, one per row.
        steps: how many tokens each row's request has generated so far: the counter of its draws.

    Raises:
        ValueError: a row that cannot be sampled, such as one without a finite maximum.
    """
    rows = sample_rows(logits, params, steps)
    for row in rows:
        if isinstance(row, str):
            raise ValueError(row)
    return [int(row) for row in rows]


def sample_rows(
    logits: Tensor, params: Sequence[SamplingParams | None], steps: Sequence[int]
) -> list[int | str]:
    """The next token of each row, or why there is none: a row never stops another.

    Args:
        logits: ``[R, vocab]``, any float dtype. A row whose maximum is NaN or infinite has no
            token.
        params: R of them; None: the row is only looked at, and its most likely token given.
        steps: as in `sample`.
    """
    rows = zip(params, steps, strict=True)
    draws = [Draw(row, param, step) for row, (param, step) in enumerate(rows) if param is not None]
    return drawn_rows(logits, draws)


class Draw(NamedTuple):
    """A row whose token is drawn, how, and after how many others."""

    row: int
    params: SamplingParams
    step: int


def drawn_rows(logits: Tensor, draws: Iterable[Draw]) -> list[int | str]:
    """`sample_rows`, where the rows that are not named in ``draws`` have no parameters."""
    ranked = RankedRows(logits)
    best, tokens = ranked.best()
    values, rows = best.tolist(), [*tokens.tolist()]
    if not math.isfinite(sum(values)):
        rows = [t if math.isfinite(v) else NOT_FINITE for v, t in zip(values, rows, strict=True)]
    random = [
        each for each in draws if each.params.temperature > 0 and rows[each.row] is not NOT_FINITE
    ]
    for draw, token in zip(random, _drawn(ranked, random), strict=True):
        rows[draw.row] = token
    return rows


def _drawn(ranked: RankedRows, draws: Sequence[Draw]) -> Sequence[int | str]:
    """All at once, or, where that fails, one by one: whatever fails is one request's alone."""
    try:
        return _tokens(ranked, draws) if draws else []
    except Exception as error:
        if len(draws) == 1:
            return [f"sampling failed: {type(error).__name__}: {error}"]
        return [token for draw in draws for token in _drawn(ranked, [draw])]


def _tokens(ranked: RankedRows, draws: Sequence[Draw]) -> list[int]:
    """Each the token at a uniform place of the running sum of its row, the most likely first."""
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
    sums = weights.cumsum(1)
    place = (sums <= uniform[:, None] * sums[:, -1:]).sum(1)
    last = np.count_nonzero(weights, axis=1) - 1
    drawn: NDArray[np.int64] = tokens[np.arange(len(draws)), np.minimum(place, last)]
    return drawn


def _of_all(ranked: RankedRows, draws: Sequence[Draw], uniform: NDArray[np.float64]) -> list[int]:
    """The tokens of rows of which any number is kept, from the running sum of each row."""
    ordered, tokens = RunningSum(ranked.vocab), []
    for draw, number in zip(draws, uniform.tolist(), strict=True):
        ordered.begin(ranked.row(draw.row), draw.params.temperature)
        if 0 < draw.params.top_k < ranked.vocab:
            ordered.cut_behind(draw.params.top_k)
        if draw.params.top_p < 1:
            ordered.cut_at(draw.params.top_p * ordered.total)
        tokens.append(ordered.at(number * ordered.total))
    return tokens


def _integer(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, Integral):
        return None
    return int(value)


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def _integers(values: object) -> tuple[int, ...] | None:
    if isinstance(values, (str, bytes, bytearray)) or not isinstance(values, Iterable):
        return None
    numbers = [_integer(value) for value in values]
    return None if None in numbers else tuple(number for number in numbers if number is not None)


def _flag(value: object) -> bool | None:
    return bool(value) if isinstance(value, (bool, np.bool_)) else None
