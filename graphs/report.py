"""One self-contained HTML page and one JSON file about a warmup or a run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

__all__ = ["write_report"]

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --line: #8884; --shade: #8881; }}
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem }}
body {{ padding: 0 1rem }}
section {{ overflow-x: auto }}
table {{ border-collapse: collapse; margin: .5rem 0 1.5rem }}
th, td {{ border-bottom: 1px solid var(--line); padding: .25rem .75rem; text-align: left }}
td.number {{ text-align: right; font-variant-numeric: tabular-nums }}
tr:nth-child(even) {{ background: var(--shade) }}
</style></head><body>
<h1>{title}</h1>
{body}
</body></html>
"""


def write_report(folder: str | Path, report: Mapping[str, Any], title: str = "Report") -> Path:
    """Write ``report.json`` and ``report.html`` to a folder, which is made if it is missing.

    Args:
        folder: where to.
        report: JSON-able values by name. Single values become one table, a mapping becomes a table
            of its own, and a list of mappings becomes a table with a column per key.
        title: heading of the page.

    Returns:
        The path of the page. It needs no network and follows the reader's light or dark setting.

    Raises:
        OSError: the folder cannot be made or written to.
        TypeError, ValueError: a value is not JSON-able, or not finite; nothing is written.
    """
    text = json.dumps(dict(report), indent=2, allow_nan=False)
    page = _PAGE.format(title=escape(title), body="\n".join(_sections(report)))
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    (target / "report.json").write_text(text + "\n", encoding="utf-8")
    (target / "report.html").write_text(page, encoding="utf-8")
    return target / "report.html"


def _sections(report: Mapping[str, Any]) -> Iterator[str]:
    single = {name: value for name, value in report.items() if not isinstance(value, dict | list)}
    if single:
        yield _table([], single.items())
    for name, value in report.items():
        if isinstance(value, dict) and value:
            yield _section(name, _table([], value.items()))
        elif isinstance(value, list) and value:
            yield _section(name, _table_of(value))


def _section(name: str, table: str) -> str:
    return f"<section><h2>{escape(name.replace('_', ' '))}</h2>{table}</section>"


def _table_of(rows: Sequence[Any]) -> str:
    if not all(isinstance(row, dict) for row in rows):
        return _table([], [(row,) for row in rows])
    columns = list(dict.fromkeys(key for row in rows for key in row))
    return _table(columns, [[row.get(column, "") for column in columns] for row in rows])


def _table(columns: Sequence[str], rows: Any) -> str:
    head = "".join(f"<th>{escape(column.replace('_', ' '))}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(_cell(value) for value in row)}</tr>" for row in rows)
    return f"<table>{f'<tr>{head}</tr>' if head else ''}{body}</table>"


def _cell(value: Any) -> str:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    text = f"{value:,}" if is_number else _flat(value)
    return f"<td{' class=number' if is_number else ''}>{escape(text)}</td>"


def _flat(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_flat(item)}" for key, item in value.items())
    return str(value)
