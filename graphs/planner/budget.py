"""Budgets: limits on graphs, seconds of warmup and bytes, and what buckets take of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from graphs.planner.cost import CostModel
from graphs.planner.demand import Floats, Points

__all__ = ["Budget", "Expense", "Expenses"]

Expense: TypeAlias = Callable[[Mapping[str, int]], float]


@dataclass(frozen=True, slots=True)
class Budget:
    """Upper limits of what a plan captures; None: no limit.

    Args:
        graphs: buckets.
        seconds: of warmup, summed over buckets.
        bytes: of captured graphs, summed over buckets.

    Raises:
        ValueError: nothing is limited, or a limit is not positive.
    """

    graphs: int | None = None
    seconds: float | None = None
    bytes: float | None = None

    def __post_init__(self) -> None:
        limits = {n: getattr(self, n) for n in ("graphs", "seconds", "bytes")}
        given = {name: limit for name, limit in limits.items() if limit is not None}
        if not given:
            raise ValueError("expected a limit, got none: set graphs, seconds or bytes")
        for name, limit in given.items():
            if not 0 < limit < math.inf or (name == "graphs" and limit != int(limit)):
                raise ValueError(f"expected {name} above 0, got {limit}: raise it, or leave it out")


class Expenses:
    """What buckets take of a budget: for each, one share per limit.

    Args:
        names: the axes.
        budget: the limits.
        seconds: warmup seconds of a bucket.
        bytes: bytes of a bucket's graph.

    Raises:
        ValueError: a limit on seconds or bytes without the function that says what a bucket takes.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        budget: Budget,
        seconds: Expense | None = None,
        bytes: Expense | None = None,
    ) -> None:
        self.counts_only = budget.seconds is None and budget.bytes is None
        self._names = names
        self._models: list[tuple[CostModel, float]] = []
        for name, limit, expense in (
            ("graphs", budget.graphs, lambda bucket: 1.0),
            ("seconds", budget.seconds, seconds),
            ("bytes", budget.bytes, bytes),
        ):
            if limit is None:
                continue
            if expense is None:
                raise ValueError(
                    f"expected a function {name}=bucket -> {name} beside a budget in {name}, got "
                    "none: pass one, fitted to a warmup for example"
                )
            self._models.append((CostModel.of_any(expense), float(limit)))

    def of(self, points: Points) -> Floats:
        """Shares of the limits that buckets take: ``[n, limits]``."""
        shares = [model.of(self._names, points) / limit for model, limit in self._models]
        return np.stack(shares, axis=1)
