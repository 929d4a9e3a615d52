"""Scales: the place of a value on an axis, in percent of its length, and the labelled values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

__all__ = ["Scale", "linear_scale", "log_scale", "number", "size_scale"]


class Tick(NamedTuple):
    """A labelled place on an axis, in percent."""

    at: float
    label: str


class Scale(NamedTuple):
    """An axis from `low` to `high`, between `start` and `start + span` percent."""

    low: float
    high: float
    is_log: bool
    start: float
    span: float
    ticks: tuple[Tick, ...]

    def at(self, value: float) -> float:
        """The place of a value, in percent; what is beyond an end is put there."""
        low, high, value = (self._bend(each) for each in (self.low, self.high, value))
        share = (value - low) / (high - low) if high > low else 0.5
        return round(self.start + self.span * min(1.0, max(0.0, share)), 2)

    def _bend(self, value: float) -> float:
        return math.log(value) if self.is_log else value

    def with_ticks(self, values: Iterable[float]) -> Scale:
        """The same axis with labels at `values`."""
        return self._replace(ticks=tuple(Tick(self.at(value), number(value)) for value in values))


def linear_scale(high: float, count: int = 5) -> Scale:
    """An axis from 0 to a round number above `high`, with about `count` labels."""
    step = _round_step((high or 1.0) / count)
    steps = max(1, math.ceil(round((high or 1.0) / step, 6)))
    scale = Scale(0.0, steps * step, False, 0.0, 100.0, ())
    return scale.with_ticks(step * i for i in range(steps + 1))


def log_scale(low: float, high: float) -> Scale:
    """A logarithmic axis between the nearest of 1, 2, 5, 10, 20, 50, ...; `low` is above 0."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    steps = [factor * 10.0**power for power in range(first, last + 1) for factor in (1, 2, 5)]
    below = max(step for step in steps if step <= low * (1 + 1e-9))
    above = min(step for step in steps if step >= high * (1 - 1e-9) and step > below)
    within = [step for step in steps if below <= step <= above]
    wide = above / below >= 100
    scale = Scale(below, above, True, 0.0, 100.0, ())
    decades = [step for step in within if math.log10(step).is_integer()]
    return scale.with_ticks(decades if wide else within)


def size_scale(sizes: Iterable[int], most: int = 8, margin: float = 6.0) -> Scale:
    """An axis for the sizes of buckets, which often double: even on a logarithm of the size + 1.

    Labels stand at sizes that occur, the smallest and the largest among them, at most `most`.
    """
    values = sorted(set(sizes))
    bent = Scale(values[0] + 1, values[-1] + 1, True, margin, 100 - 2 * margin, ())
    chosen = _apart(values, lambda size: bent.at(size + 1), 100 / most)
    return bent._replace(ticks=tuple(Tick(bent.at(s + 1), number(s)) for s in chosen))


def number(value: float | int | None) -> str:
    """A value in few digits: 1,234, 12.3, 0.0042; a dash for none."""
    if value is None:
        return "–"
    if isinstance(value, int) or (float(value).is_integer() and abs(value) < 1e15):
        return f"{int(value):,}"
    digits = min(6, max(0, 2 - math.floor(math.log10(abs(value)))))
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if digits else text


def _apart(values: list[int], at: Callable[[int], float], gap: float) -> list[int]:
    # The ends always; between them from the right, where the large sizes are, as many as fit.
    first, last = values[0], values[-1]
    chosen = [last]
    for value in reversed(values[1:-1]):
        if at(chosen[-1]) - at(value) >= gap and at(value) - at(first) >= gap:
            chosen.append(value)
    return sorted({first, *chosen})


def _round_step(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1.0, 2.0, 2.5, 5.0, 10.0) if factor * power >= step)
