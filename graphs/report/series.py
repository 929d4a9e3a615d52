"""Values over time: lines on a common pair of axes, thinned so that no peak is lost."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphs.report.scale import Scale, linear_scale, number

__all__ = ["series_charts"]

_COLUMNS = 300
_COLOURS = 4
_TOOLTIPS = 48
# A limit further above the highest value than this would press the lines flat.
_NEAR = 3


def series_charts(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What the template needs for each chart of `report["series"]`.

    An entry has a `title`, `x` (ascending), `lines` (values by name, as many as `x` has), and
    perhaps `x_label`, `y_label` and a `limit` that is drawn as a line of its own.

    Raises:
        ValueError: a line has another length than `x`, there is none, or there are too many.
    """
    charts = report.get("series") or ()
    return [_chart(chart) for chart in charts if chart.get("x")]


def thinned(
    x: NDArray[np.float64], y: NDArray[np.float64], columns: int = _COLUMNS
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """At most two points per column: the lowest and the highest, in their order, and both ends."""
    if len(x) <= 2 * columns:
        return x, y
    edges = np.linspace(0, len(x), columns + 1).astype(int)
    kept = {0, len(x) - 1}
    for begin, end in itertools.pairwise(edges.tolist()):
        kept |= {begin + int(y[begin:end].argmin()), begin + int(y[begin:end].argmax())}
    places = np.array(sorted(kept))
    return x[places], y[places]


def _chart(chart: Mapping[str, Any]) -> dict[str, Any]:
    title, x = str(chart.get("title", "")), np.asarray(chart["x"], np.float64)
    lines = {str(name): np.asarray(y, np.float64) for name, y in chart.get("lines", {}).items()}
    if not lines or any(line.shape != x.shape for line in lines.values()):
        shapes = ", ".join(f"{name} has {len(line)}" for name, line in lines.items()) or "no line"
        raise ValueError(f"series {title!r}: expected lines of {len(x)} values, got {shapes}")
    if len(lines) > _COLOURS:
        raise ValueError(
            f"series {title!r}: expected at most {_COLOURS} lines, got {len(lines)}: make two"
        )
    limit: float | None = chart.get("limit")
    peak = max(float(line.max()) for line in lines.values())
    drawn = limit if limit is not None and limit <= _NEAR * peak else None
    x_scale = linear_scale(float(x.max()))
    y_scale = linear_scale(peak if drawn is None else max(peak, drawn))
    return {
        "title": title,
        "x_label": str(chart.get("x_label", "")),
        "y_label": str(chart.get("y_label", "")),
        "x": x_scale,
        "y": y_scale,
        "limit": None if limit is None else number(limit),
        "limit_at": None if drawn is None else 100 - y_scale.at(drawn),
        "lines": [
            {"name": name, "path": _path(x, y, x_scale, y_scale), "peak": number(float(y.max()))}
            for name, y in lines.items()
        ],
        "columns": _columns(x, lines, x_scale, str(chart.get("x_label", ""))),
    }


def _path(x: NDArray[np.float64], y: NDArray[np.float64], x_scale: Scale, y_scale: Scale) -> str:
    points = zip(*(part.tolist() for part in thinned(x, y)), strict=True)
    return " ".join(f"{x_scale.at(a):g},{100 - y_scale.at(b):g}" for a, b in points)


def _columns(
    x: NDArray[np.float64], lines: Mapping[str, NDArray[np.float64]], scale: Scale, label: str
) -> list[dict[str, Any]]:
    # What a reader points at: upright stripes, each with the values in its middle.
    stripes = []
    for i in range(_TOOLTIPS):
        middle = scale.high * (i + 0.5) / _TOOLTIPS
        if middle > x[-1]:
            break
        at = max(0, int(np.searchsorted(x, middle, side="right")) - 1)
        values = [f"{name} {number(float(y[at]))}" for name, y in lines.items()]
        stripes.append(
            {
                "x": round(100 * i / _TOOLTIPS, 2),
                "width": round(100 / _TOOLTIPS, 2),
                "text": "\n".join([f"{number(float(x[at]))} {label}".strip(), *values]),
            }
        )
    return stripes
