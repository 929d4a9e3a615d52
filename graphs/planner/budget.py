"""Budgets: limits on graphs, seconds of warmup and bytes, and what buckets take of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from graphs.planner.cost import CostModel, Floats
from graphs.planner.demand import Points

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
        self._names = names
        self._models: list[CostModel] = []
        limits = [float(budget.graphs)] if budget.graphs is not None else []
        self.counts_only = budget.seconds is None and budget.bytes is None
        self._has_graphs = bool(limits)
        for name, limit, expense in (
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
            self._models.append(expense if isinstance(expense, CostModel) else CostModel(expense))
            limits.append(float(limit))
        self._limits = np.array(limits)

    def of(self, points: Points) -> Floats:
        """Shares of the limits that buckets take: ``[n, limits]``."""
        columns = [np.ones(len(points))] if self._has_graphs else []
        columns += [model.of(self._names, points) for model in self._models]
        shares: Floats = np.stack(columns, axis=1) / self._limits
        return shares
