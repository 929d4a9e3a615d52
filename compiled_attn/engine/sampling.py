"""The sampler: greedy, temperature, top-k, top-p, reproducible per request."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["NOT_FINITE", "SamplingParams", "sample", "sample_rows"]

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
    best, tokens = logits.max(-1)  # NaN is the maximum of a row that has one
    drawn: list[int | str] = list(tokens.tolist())
    for row, (value, param, step) in enumerate(zip(best.tolist(), params, steps, strict=True)):
        if not math.isfinite(value):
            drawn[row] = NOT_FINITE
        elif param is not None and param.temperature > 0:
            drawn[row] = _drawn(logits[row], param, step)
    return drawn


def _drawn(logits: Tensor, params: SamplingParams, step: int) -> int | str:
    try:
        return _draw(logits.double(), params, step)
    except Exception as error:  # whatever it is, it is this request's alone
        return f"sampling failed: {type(error).__name__}: {error}"


def _draw(logits: Tensor, params: SamplingParams, step: int) -> int:
    scaled = (logits - logits.max()) / params.temperature  # the largest is 0: nothing overflows
    ordered, tokens = torch.sort(scaled, descending=True, stable=True)
    if params.top_k:
        ordered = ordered[: params.top_k]
    probabilities = torch.softmax(ordered, -1)
    before = probabilities.cumsum(-1) - probabilities
    # A token stays if the more likely ones don't reach top_p yet: the first one always stays.
    kept = probabilities[before < params.top_p].cumsum(-1)
    key = 0 if params.seed is None else params.seed
    uniform = np.random.Generator(np.random.Philox(key=key, counter=step)).random()
    place = int(torch.searchsorted(kept, uniform * float(kept[-1]), right=True))
    return int(tokens[min(place, len(kept) - 1)])


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
