"""Writes the HTML page and the JSON file of a report."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graphs.files import write_whole
from graphs.installation import install_command
from graphs.report.charts import charts
from graphs.report.rows import bucket_rows
from graphs.report.tables import facts, tables

__all__ = ["check_libraries", "write_report"]


def write_report(folder: str | Path, report: Mapping[str, Any], title: str = "Report") -> Path:
    """Write `report.json` and `report.html` to a folder, which is made if it is missing.

    Args:
        folder: where to write.
        report: JSON-able values by name. Single values are shown at the top; a mapping becomes a
            table, and so does a list of mappings, with a column per key. Two keys become charts
            as well: `buckets`, a list of rows (see :class:`graphs.report.rows.BucketRow`), and
            `series`, values over time: entries with a `title`, an ascending `x`, `lines` (values by
            name, as many as in `x`), and optionally `x_label`, `y_label` and a `limit`.
        title: heading of the page.

    Returns:
        The path of the page. It needs no network and no script, and follows the light or dark
        setting of the browser.

    Raises:
        OSError: the folder cannot be made or written to.
        TypeError, ValueError: a value is not JSON-able, or not finite, or lines of a series have
            different lengths; nothing is written.
        ImportError: jinja2 or matplotlib (extra `report`) is not installed; nothing is written.
    """
    text = json.dumps(dict(report), indent=2, allow_nan=False)
    page = _render(report, title)
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    write_whole(target / "report.json", f"{text}\n".encode())
    write_whole(target / "report.html", page.encode())
    return target / "report.html"


def check_libraries() -> None:
    """Raise ImportError, naming the extra to install, if a library of the page is missing."""
    try:
        import jinja2  # noqa: F401
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"the report needs {error.name}: {install_command('report')}", name=error.name
        ) from error


def _render(report: Mapping[str, Any], title: str) -> str:
    check_libraries()
    import jinja2

    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return templates.get_template("page.html").render(
        title=title,
        facts=facts(report),
        charts=charts(report, bucket_rows(report)),
        tables=list(tables(report)),
    )
