"""The report: one page without a network, and the same numbers as JSON."""

from __future__ import annotations

import json
import sys
from html.parser import HTMLParser

import pytest
import torch

from graphs import WarmupManager, explicit
from graphs.report import describe, write_report
from graphs.report.tables import number

pytest.importorskip("matplotlib", reason="needs the extra report")

TEXTS = ("td", "th", "h1", "h2", "dt", "dd", "title")


class _Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.texts: list[tuple[str, str]] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.attributes += attrs
        self.tags.append(tag)
        if tag in TEXTS:
            self.texts.append((tag, ""))

    def handle_data(self, data):
        if self.texts and self.tags[-1] == self.texts[-1][0]:
            tag, text = self.texts[-1]
            self.texts[-1] = (tag, (text + data).strip())

    def of(self, *tags: str) -> list[str]:
        return [text for tag, text in self.texts if tag in tags]


REPORT = {
    "graphs": 3,
    "torch": "<2.13>",
    "strict": True,
    "step_ms": {"p50": 1.5, "max": 1234.5},
    "buckets": [{"bucket": "tokens=4", "hits": 7}, {"bucket": "tokens=8", "step": {"p50": 2.0}}],
    "ties": [],
    "notes": ["one", 2],
}


def page_of(folder, report, **options) -> _Page:
    return _Page(write_report(folder, report, **options).read_text(encoding="utf-8"))


def test_values_mappings_and_lists_are_all_shown(tmp_path):
    page = page_of(tmp_path / "new", REPORT, title="A & B")
    assert page.of("h1") == ["A & B"] and page.of("title")[0] == "A & B"
    assert page.of("dt") == ["graphs", "torch", "strict"]
    assert page.of("dd") == ["3", "<2.13>", "yes"]
    assert page.of("h2") == ["Buckets", "Step ms", "Buckets in numbers", "Notes"]
    assert page.of("th") == ["bucket", "hits", "step"]
    assert page.of("td") == [
        "p50", "1.5", "max", "1,234", "tokens=4", "7", "", "tokens=8", "", "p50 2", "one", "2"
    ]  # fmt: skip


def test_the_json_file_holds_the_report_as_it_is(tmp_path):
    write_report(tmp_path, REPORT)
    assert json.loads((tmp_path / "report.json").read_text()) == REPORT
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "report.json"]


def test_the_page_loads_nothing_and_runs_no_script(tmp_path):
    page = page_of(tmp_path, REPORT)
    addresses = [value for name, value in page.attributes if name in ("src", "href", "xlink:href")]
    assert {address for address in addresses if not address.startswith("#")} == {"data:,"}
    assert "script" not in page.tags
    assert not any(name.startswith("on") for name, _ in page.attributes)
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'; img-src data:") in (
        page.attributes
    )


def test_text_of_the_report_stays_text(tmp_path):
    evil = "<script>alert(1)</script>\"'"
    row = {"bucket": f"{evil} a=1", "status": "failed", "error": evil}
    report = {evil: evil, "rows": [{evil: evil}], "buckets": [row]}
    page = page_of(tmp_path, report, title=evil)
    assert "script" not in page.tags
    assert page.of("h1") == [evil]


def test_an_empty_report_is_a_page_too(tmp_path):
    assert page_of(tmp_path, {}).of("h1") == ["Report"]


@pytest.mark.parametrize(
    "bad",
    [
        object(),
        float("nan"),
        [{"title": "t", "x": [0, 1], "lines": {"a": [1]}}],
        [{"title": "t", "x": [0, 1], "lines": {}}],
    ],
)
def test_a_value_that_cannot_be_shown_leaves_nothing_behind(bad, tmp_path):
    with pytest.raises((TypeError, ValueError)):
        write_report(tmp_path / "new", {"series": bad})
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("missing", ["jinja2", "matplotlib"])
def test_without_the_extra_it_is_named_and_nothing_is_written(missing, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=rf"{missing}: pip install .*\[report\]"):
        write_report(tmp_path / "new", REPORT)
    assert not (tmp_path / "new").exists()


def picky(x):
    if x.shape[0] == 3:
        raise ZeroDivisionError("three")
    return x + 1


def test_a_manager_is_described_with_hits_and_failures(tmp_path):
    space = explicit(["rows"], [2, 3, 4])
    manager = WarmupManager(picky, space, lambda b: (torch.zeros(b.rows),), backend="eager")
    assert describe(manager)["buckets"] == []
    manager.warmup()
    manager.bucket(rows=1)
    found = describe(manager)
    assert (found["graphs"], found["failed"]) == (2, 1)
    rows = {row["bucket"]: row for row in found["buckets"]}
    assert [rows[f"rows={n}"]["hits"] for n in (2, 3, 4)] == [1, 0, 0]
    assert "three" in rows["rows=3"]["error"]
    page = write_report(tmp_path, found).read_text()
    assert "rows=3: failed, " in page and "rows=4: never hit" in page
    assert json.loads((tmp_path / "report.json").read_text()) == found


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1234567, "1,234,567"),
        (12.0, "12"),
        (1411.26, "1,411"),
        (12.345, "12.3"),
        (1.5, "1.5"),
        (0.0421, "0.0421"),
        (0.0, "0"),
        (-3.14159, "-3.14"),
        (None, "–"),
    ],
)
def test_a_number_has_few_digits(value, text):
    assert number(value) == text
