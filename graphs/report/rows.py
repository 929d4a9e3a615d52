"""Rows of a report about buckets: parsed from any report, and made from a warmup manager."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from graphs.warmup.manager import WarmupManager

__all__ = ["BucketRow", "bucket_rows", "describe", "short_names"]

_SIZE = re.compile(r"(\w+)=(\d+)")


@dataclass(frozen=True)
class BucketRow:
    """One bucket of a report; None for values that the report does not have.

    Attributes:
        sizes: by axis.
        hits: how often it was used.
        waste: share of padding in what ran in it, 0 to 1.
        step_ms: percentiles of its steps in milliseconds: p50, p99, max.
    """

    name: str
    sizes: Mapping[str, int] = field(default_factory=dict)
    hits: int | None = None
    waste: float | None = None
    step_ms: Mapping[str, float] = field(default_factory=dict)
    status: str = "captured"
    error: str = ""

    @property
    def is_captured(self) -> bool:
        """Whether it can be used."""
        return self.status == "captured"


def bucket_rows(report: Mapping[str, Any]) -> list[BucketRow]:
    """The rows of `report["buckets"]` that have a name.

    The name is `bucket`, such as `tokens=4 blocks=16`, from which sizes are parsed unless there is
    `sizes`; `hits` may be called `steps`.
    """
    rows = report.get("buckets")
    if not isinstance(rows, Sequence) or isinstance(rows, str):
        return []
    return [_row(row) for row in rows if isinstance(row, Mapping) and row.get("bucket")]


def short_names(rows: Sequence[BucketRow]) -> dict[str, str]:
    """Names of buckets without the axes on which all rows have the same size."""
    sizes: dict[str, set[int | None]] = {}
    for row in rows:
        for axis in row.sizes:
            sizes.setdefault(axis, {each.sizes.get(axis) for each in rows})
    varying = [axis for axis, found in sizes.items() if len(found) > 1]
    return {
        row.name: " ".join(f"{axis}={row.sizes[axis]}" for axis in varying if axis in row.sizes)
        or row.name
        for row in rows
    }


def _row(row: Mapping[str, Any]) -> BucketRow:
    name = str(row["bucket"])
    sizes = row.get("sizes")
    if not isinstance(sizes, Mapping):
        sizes = {axis: int(size) for axis, size in _SIZE.findall(name)}
    hits = _number(row.get("hits", row.get("steps")))
    step_ms = row.get("step_ms")
    times = step_ms if isinstance(step_ms, Mapping) else {}
    return BucketRow(
        name,
        {str(axis): int(size) for axis, size in sizes.items()},
        None if hits is None else int(hits),
        _number(row.get("waste")),
        {key: value for key, value in times.items() if _number(value) is not None},
        str(row.get("status", "captured")),
        str(row.get("error", "")),
    )


def _number(value: object) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number else None  # type: ignore[arg-type]


def describe(manager: WarmupManager) -> dict[str, Any]:
    """The state of a manager as JSON-able values for :func:`graphs.report.write_report`.

    Has totals, and a row per bucket that the warmup reached: status, seconds, bytes, compiles,
    error, and how often it was chosen since.
    """
    report = manager.report
    results = report.results if report else ()
    return {
        "name": manager.name,
        "torch": torch.__version__,
        "graphs": len(report.captured) if report else 0,
        "failed": len(report.failed) if report else 0,
        "skipped": len(report.skipped) if report else 0,
        "warmup_seconds": round(report.elapsed_seconds, 3) if report else 0.0,
        "compiles": report.compiles if report else 0,
        "overflows": manager.overflows,
        "degraded": manager.degraded,
        "fallbacks": manager.fallbacks,
        "buckets": [
            {
                "bucket": str(result.bucket),
                "status": result.status,
                "hits": manager.hits.get(result.bucket, 0),
                "warmup_seconds": round(result.seconds, 3),
                "run_seconds": result.run_seconds,
                "bytes": result.bytes,
                "compiles": result.compiles,
                "error": result.error,
            }
            for result in results
        ],
    }
