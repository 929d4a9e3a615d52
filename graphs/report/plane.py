"""The buckets on the plane of their two widest axes: how often each was used, and how well."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from graphs.report.rows import BucketRow
from graphs.report.scale import Scale, number, size_scale

__all__ = ["plane"]

_WASTE_STEPS = (0.1, 0.25, 0.5, 0.75)
_SMALLEST, _LARGEST = 5.0, 20.0


@dataclass(frozen=True)
class Mark:
    """One point of the plane, for all buckets that fall on it: radius in pixels, class, tooltip."""

    x: float
    y: float
    radius: float
    kind: str
    text: str


def widest_axes(rows: Sequence[BucketRow]) -> list[str]:
    """The one or two axes with the most different sizes, the widest first."""
    sizes: dict[str, set[int]] = {}
    for row in rows:
        for axis, size in row.sizes.items():
            sizes.setdefault(axis, set()).add(size)
    ranked = sorted(sizes, key=lambda axis: (-len(sizes[axis]), -max(sizes[axis])))
    return [axis for axis in ranked[:2] if len(sizes[axis]) > 1] or ranked[:1]


def plane(rows: Sequence[BucketRow]) -> dict[str, Any] | None:
    """What the template of the plane needs, or None where no bucket has sizes.

    Buckets with the same two sizes share a mark. Its area grows with their hits, its shade with
    their waste; one that was never hit is hollow, one that was not captured a cross.
    """
    rows = [row for row in rows if row.sizes]
    axes = widest_axes(rows)
    if not axes:
        return None
    at: dict[tuple[int, ...], list[BucketRow]] = {}
    for row in rows:
        at.setdefault(tuple(row.sizes.get(axis, 0) for axis in axes), []).append(row)
    x_scale = size_scale((place[0] for place in at), most=7)
    y_scale = size_scale((place[1] for place in at), most=9) if len(axes) == 2 else None
    most = max((_hits(group) for group in at.values()), default=0)
    marks = [
        _mark(group, x_scale.at(place[0] + 1), _height(y_scale, place), most)
        for place, group in at.items()
    ]
    return {
        "axes": axes,
        "x": x_scale,
        "y": y_scale,
        "marks": sorted(marks, key=lambda mark: -mark.radius),  # the small ones on top
        "captured": sum(row.is_captured for row in rows),
        "lost": sum(not row.is_captured for row in rows),
        "never_hit": sum(row.is_captured and row.hits == 0 for row in rows),
        "is_shared": len(at) < len(rows),
        "has_hits": any(row.hits is not None for row in rows),
        "has_waste": any(row.waste is not None for row in rows),
        "waste_labels": ["under 10 %", "to 25 %", "to 50 %", "to 75 %", "above"],
    }


def _height(scale: Scale | None, place: tuple[int, ...]) -> float:
    return 50.0 if scale is None else round(100 - scale.at(place[1] + 1), 2)


def _mark(group: Sequence[BucketRow], x: float, y: float, most: int) -> Mark:
    hits = _hits(group)
    share = math.sqrt(hits / most) if most else 0.0
    radius = round(_SMALLEST + share * (_LARGEST - _SMALLEST), 1)
    return Mark(x, y, radius, _kind(group), "\n".join(map(_tooltip, group)))


def _kind(group: Sequence[BucketRow]) -> str:
    if not any(row.is_captured for row in group):
        return "lost"
    if any(row.hits is not None for row in group) and not _hits(group):
        return "never"
    waste = _mean_waste(group)
    if waste is None:
        return "hit"
    return f"w{sum(waste >= step for step in _WASTE_STEPS)}"


def _mean_waste(group: Sequence[BucketRow]) -> float | None:
    known = [(row.waste, row.hits or 0) for row in group if row.waste is not None and row.hits]
    weight = sum(hits for _, hits in known)
    return sum(waste * hits for waste, hits in known) / weight if weight else None


def _hits(group: Sequence[BucketRow]) -> int:
    return sum(row.hits or 0 for row in group)


def _tooltip(row: BucketRow) -> str:
    if not row.is_captured:
        return f"{row.name}: {row.status}" + (f", {row.error}" if row.error else "")
    parts = [] if row.hits is None else [f"{number(row.hits)} hits" if row.hits else "never hit"]
    if row.waste is not None and row.hits:
        parts.append(f"{row.waste:.0%} padding")
    return f"{row.name}: {', '.join(parts) or 'captured'}"
