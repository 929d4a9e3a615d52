"""A self-contained HTML page and a JSON file about a warmup or a run."""

from __future__ import annotations

from graphs.report.page import write_report
from graphs.report.rows import describe

__all__ = ["describe", "write_report"]
