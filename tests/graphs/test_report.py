"""The report: one page without a network, and the same numbers as JSON."""

from __future__ import annotations

import json
from html.parser import HTMLParser

import pytest

from graphs.report import write_report


class _Cells(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.cells: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag, attrs):
        self.attributes += attrs
        if tag in ("td", "th", "h1", "h2"):
            self.cells.append("")

    def handle_data(self, data):
        if self.cells:
            self.cells[-1] += data.strip()


REPORT = {
    "graphs": 3,
    "torch": "<2.13>",
    "step_ms": {"p50": 1.5, "max": 1234.0},
    "buckets": [{"bucket": "tokens=4", "hits": 7}, {"bucket": "tokens=8", "step": {"p50": 2.0}}],
    "ties": [],
}


def test_values_mappings_and_lists_become_tables(tmp_path):
    page = _Cells()
    page.feed(write_report(tmp_path / "new", REPORT, title="A & B").read_text())
    assert page.cells[:5] == ["A & B", "graphs", "3", "torch", "<2.13>"]
    assert page.cells[5:10] == ["step ms", "p50", "1.5", "max", "1,234.0"]
    assert page.cells[10:] == [
        "buckets", "bucket", "hits", "step", "tokens=4", "7", "", "tokens=8", "", "p50 2.0"
    ]  # fmt: skip


def test_the_json_file_holds_the_report_as_it_is(tmp_path):
    write_report(tmp_path, REPORT)
    assert json.loads((tmp_path / "report.json").read_text()) == REPORT


def test_the_page_loads_nothing(tmp_path):
    page = _Cells()
    page.feed(write_report(tmp_path, REPORT).read_text())
    assert not {"src", "href"} & {name for name, _ in page.attributes}


def test_a_value_that_is_not_json_leaves_nothing_behind(tmp_path):
    with pytest.raises(TypeError):
        write_report(tmp_path / "new", {"bad": object()})
    assert not (tmp_path / "new").exists()
