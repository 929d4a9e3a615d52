"""Cost models of buckets: a formula, or a fit to measurements."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compiled_attn.planner.demand import Floats, Points
from graphs.buckets.space import Bucket

__all__ = ["CostModel", "evaluate"]

_SWEEPS, _CHUNK = 3000, 1024


class CostModel:
    """A cost in any unit that never falls where a size grows.

    Args:
        formula: maps sizes by axis to a number from 0 on. Written with ``+ - * /``, comparisons
            and numpy functions it also takes an array of sizes per axis, which makes planning fast;
            any other formula is called once per point.

    Example::

        cost = CostModel(lambda need: 15 * need["tokens"] + 6 * need["blocks"])
        cost({"tokens": 2, "blocks": 10})  # 90.0
    """

    def __init__(self, formula: Callable[[Mapping[str, Any]], Any]) -> None:
        self._formula = formula

    @classmethod
    def of_any(cls, cost: CostModel | Callable[[Mapping[str, Any]], Any] | None) -> CostModel:
        """Wrap a formula; None: the product of all sizes, each at least 1."""
        if cost is None:
            return cls(lambda need: math.prod(np.maximum(size, 1) for size in need.values()))
        return cost if isinstance(cost, CostModel) else cls(cost)

    @classmethod
    def fitted(cls, measured: Iterable[tuple[Mapping[str, int], float]]) -> CostModel:
        """Fit a cost to measurements: it equals them as far as they rise with the sizes.

        Between them the cost is a sum of a constant, the sizes and their products, with
        non-negative coefficients of least relative error, clipped to the measurements below and
        above. Measurements that fall where a size grows are averaged.

        Args:
            measured: buckets, and the seconds of one run of each.

        Raises:
            ValueError: no measurement, different axes, or seconds that are not positive and finite.
        """
        rows = [(dict(bucket), float(seconds)) for bucket, seconds in measured]
        if not rows:
            raise ValueError("expected at least one measured bucket, got none: warm up first")
        names = tuple(rows[0][0])
        for bucket, seconds in rows:
            if set(bucket) != set(names) or not 0 < seconds < math.inf:
                raise ValueError(
                    f"expected sizes of {', '.join(names)} and positive seconds, got {bucket} and "
                    f"{seconds}: measure again"
                )
        points = np.array([[b[name] for name in names] for b, _ in rows], np.float64)
        return cls(_Fit(names, points, np.array([seconds for _, seconds in rows])))

    def __call__(self, need: Mapping[str, int]) -> float:
        """Return the cost of one bucket or need."""
        return float(self._formula(need))

    def of(self, names: Sequence[str], points: Points) -> Floats:
        """Return the costs ``[n]`` of points ``[n, axes]`` over the named axes.

        Raises:
            ValueError: a cost is negative or not finite.
        """
        costs = evaluate(self._formula, names, points).astype(np.float64)
        if not (np.isfinite(costs) & (costs >= 0)).all():
            at = int(np.argmin(np.isfinite(costs) & (costs >= 0)))
            need = dict(zip(names, points[at].tolist(), strict=True))
            raise ValueError(
                f"expected finite costs from 0 on, got {costs[at]} for {need}: correct the formula"
            )
        return costs


def evaluate(
    function: Callable[[Mapping[str, Any]], Any], names: Sequence[str], points: Points
) -> NDArray[Any]:
    """Call a function of sizes by axis for points ``[n, axes]``: with arrays, or else per point."""
    try:
        found = function(dict(zip(names, points.T.astype(np.float64), strict=True)))
        return np.broadcast_to(found, len(points))
    except (TypeError, ValueError, AttributeError):
        rows = (Bucket.of(tuple(names), tuple(row)) for row in points.tolist())
        return np.array([function(row) for row in rows])


class _Fit:
    """Non-negative least squares over sizes and their products, clipped to the measurements."""

    def __init__(self, names: tuple[str, ...], points: Floats, seconds: Floats) -> None:
        self._names = names
        self._points = points
        below = (points[:, None] >= points[None]).all(axis=2)  # [i, j]: i dominates j
        least = np.where(below, seconds[None], -np.inf).max(axis=1)
        most = np.where(below.T, seconds[None], np.inf).min(axis=1)
        self._seconds = (least + most) / 2
        self._scale = np.maximum(points.max(axis=0), 1)
        rows = self._features(points) / self._seconds[:, None]
        self._weights = _non_negative_least_squares(rows, np.ones(len(rows)))

    def __call__(self, need: Mapping[str, Any]) -> Any:
        columns = [np.atleast_1d(np.asarray(need[name], np.float64)) for name in self._names]
        given = np.stack(np.broadcast_arrays(*columns), axis=1)
        chunks = range(0, max(len(given), 1), _CHUNK)
        costs = np.concatenate([self._costs(given[at : at + _CHUNK]) for at in chunks])
        return costs if np.ndim(next(iter(need.values()))) else float(costs[0])

    def _costs(self, given: Floats) -> Floats:
        above = (given[:, None] >= self._points[None]).all(axis=2)
        under = (given[:, None] <= self._points[None]).all(axis=2)
        low = np.where(above, self._seconds, 0.0).max(axis=1)
        high = np.where(under, self._seconds, np.inf).min(axis=1)
        costs: Floats = np.clip(self._features(given) @ self._weights, low, high)
        return costs

    def _features(self, points: Floats) -> Floats:
        sizes = points / self._scale
        one, two = np.triu_indices(sizes.shape[1])
        return np.hstack([np.ones((len(sizes), 1)), sizes, sizes[:, one] * sizes[:, two]])


def _non_negative_least_squares(rows: Floats, target: Floats) -> Floats:
    """Coordinate descent on the normal equations: the columns are few."""
    gram, aim = rows.T @ rows, rows.T @ target
    weights = np.zeros(len(aim))
    for _ in range(_SWEEPS):
        before = weights.copy()
        for at in np.flatnonzero(gram.diagonal() > 0):
            step = (aim[at] - gram[at] @ weights) / gram[at, at]
            weights[at] = max(0.0, weights[at] + step)
        if np.abs(weights - before).max() <= 1e-9 * weights.max(initial=1e-300):
            break
    return weights
