"""Bars, one a bucket on a common axis: seconds of warmup, and percentiles of step times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from graphs.report.rows import BucketRow, short_names
from graphs.report.scale import Scale, linear_scale, log_scale, number

__all__ = ["step_times", "warmup_seconds"]

# Beyond so many rows the rest is folded away.
_SHOWN = 24
# Beyond this ratio between the slowest and the fastest, only a logarithm shows both.
_WIDE = 20


def warmup_seconds(rows: Sequence[BucketRow]) -> dict[str, Any] | None:
    """Bars of the seconds that each capture took, the longest first, or None if nothing is known.

    Where the cold seconds are known too, they stand behind those of this start.
    """
    known = [row for row in rows if row.warmup_seconds is not None and row.is_captured]
    if not known:
        return None
    known.sort(key=lambda row: -max(row.warmup_seconds or 0, row.cold_seconds or 0))
    colds = [row.cold_seconds for row in known if row.cold_seconds is not None]
    names = short_names(rows)
    scale = linear_scale(max(max(row.warmup_seconds or 0 for row in known), *colds, 0.0))
    return {
        "scale": scale,
        "has_cold": bool(colds),
        "total": number(round(sum(row.warmup_seconds or 0 for row in known), 2)),
        "cold_total": number(round(sum(colds), 2)) if colds else "",
        "shown": [_bar(row, names, scale) for row in known[:_SHOWN]],
        "folded": [_bar(row, names, scale) for row in known[_SHOWN:]],
    }


def step_times(rows: Sequence[BucketRow]) -> dict[str, Any] | None:
    """Median, 99th percentile and maximum per bucket, the most used first, or None without any."""
    known = [row for row in rows if row.hits and row.step_ms.get("p50", 0) > 0]
    if not known:
        return None
    known.sort(key=lambda row: -(row.hits or 0))
    names = short_names(rows)
    low = min(row.step_ms["p50"] for row in known)
    high = max(max(row.step_ms.values()) for row in known)
    scale = log_scale(low, high) if high / low > _WIDE else linear_scale(high)
    return {
        "scale": scale,
        "shown": [_range(row, names, scale) for row in known[:_SHOWN]],
        "folded": [_range(row, names, scale) for row in known[_SHOWN:]],
    }


def _bar(row: BucketRow, names: Mapping[str, str], scale: Scale) -> dict[str, Any]:
    warm, cold = row.warmup_seconds or 0.0, row.cold_seconds
    text = f"{row.name}: {number(warm)} s" + (f", cold {number(cold)} s" if cold else "")
    return {
        "name": names[row.name],
        "width": scale.at(warm),
        "cold_width": None if cold is None else scale.at(cold),
        "value": f"{number(warm)} s",
        "note": "" if cold is None else f"cold {number(cold)} s",
        "text": text,
    }


def _range(row: BucketRow, names: Mapping[str, str], scale: Scale) -> dict[str, Any]:
    p50 = row.step_ms["p50"]
    p99 = row.step_ms.get("p99", p50)
    most = row.step_ms.get("max", p99)
    times = ", ".join(f"{name} {number(value)} ms" for name, value in row.step_ms.items())
    return {
        "name": names[row.name],
        "p50": scale.at(p50),
        "p99": scale.at(p99),
        "max": scale.at(most),
        "value": f"{number(p50)} ms",
        "note": f"{number(row.hits)} steps",
        "text": f"{row.name}: {number(row.hits)} steps, {times}",
    }
