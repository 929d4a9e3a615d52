"""The state of a warmup manager, in the form that the report shows."""

from __future__ import annotations

from typing import Any

import torch

from graphs.warmup.manager import WarmupManager

__all__ = ["describe"]


def describe(manager: WarmupManager) -> dict[str, Any]:
    """The state of a manager as JSON-able values for :func:`graphs.report.write_report`.

    Counts and seconds of the whole, and a row per bucket that a warmup has reached: its sizes, its
    status, seconds, bytes, compiles and error, and how often it was chosen since.
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
