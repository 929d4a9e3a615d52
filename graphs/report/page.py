"""The page of a report and its JSON, written completely or not at all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graphs.files import write_whole
from graphs.report.bars import step_times, warmup_seconds
from graphs.report.plane import plane
from graphs.report.rows import bucket_rows
from graphs.report.series import series_charts
from graphs.report.tables import facts, tables

__all__ = ["write_report"]


def write_report(folder: str | Path, report: Mapping[str, Any], title: str = "Report") -> Path:
    """Write `report.json` and `report.html` to a folder, which is made if it is missing.

    Args:
        folder: where to.
        report: JSON-able values by name. Single values stand at the top, a mapping becomes a table,
            and so does a list of mappings, with a column per key. Two keys are drawn as well:
            `buckets`, a list of rows (see :class:`graphs.report.rows.BucketRow`), and `series`,
            values over time (see :func:`graphs.report.series.series_charts`).
        title: heading of the page.

    Returns:
        The path of the page. It needs no network and no script, and follows the reader's light or
        dark setting.

    Raises:
        OSError: the folder cannot be made or written to.
        TypeError, ValueError: a value is not JSON-able, or not finite, or lines of a series have
            different lengths; nothing is written.
        ImportError: jinja2 (extra `report`) is not installed; nothing is written.
    """
    text = json.dumps(dict(report), indent=2, allow_nan=False)
    page = _render(report, title)
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    write_whole(target / "report.json", f"{text}\n".encode())
    write_whole(target / "report.html", page.encode())
    return target / "report.html"


def _render(report: Mapping[str, Any], title: str) -> str:
    try:
        import jinja2
    except ImportError as error:
        raise ImportError(
            "the report needs jinja2: pip install 'compiled-attn[report]'", name="jinja2"
        ) from error
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    rows = bucket_rows(report)
    return templates.get_template("page.html").render(
        title=title,
        facts=facts(report),
        plane=plane(rows),
        warmup=warmup_seconds(rows),
        steps=step_times(rows),
        series=series_charts(report),
        tables=list(tables(report)),
    )
