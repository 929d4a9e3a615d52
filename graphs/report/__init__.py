"""One self-contained HTML page and one JSON file about a warmup or a run."""

from __future__ import annotations

from graphs.report.describe import describe
from graphs.report.page import write_report

__all__ = ["describe", "write_report"]
