"""Write docs/benchmarks.md from the results in benchmarks/results.

    python benchmarks/docs_page.py

Each JSON file answers one question: its columns say what was measured where (machine, dtype,
threads, torch, date), its rows have a cell per column, and its command prints them again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
HEADER = """\
# How fast is it?

`make docs-benchmarks` writes this page from [raw output](../benchmarks/results). Ratios are speeds
over what you would use instead: interleaved medians of one run. `make bench` runs them on yours.
"""
_PLACE = ("machine", "dtype", "threads", "torch", "date")


def page() -> str:
    """The text of docs/benchmarks.md."""
    files = [json.loads(path.read_text()) for path in RESULTS.glob("*.json")]
    questions = [each for each in files if "question" in each]  # others are raw output
    questions.sort(key=lambda question: question["order"])
    sections = [_section(question) for question in questions]
    return "\n".join([HEADER, *sections, _torch_versions()])


def _section(question: Mapping[str, Any]) -> str:
    columns = question["columns"]
    shared = {
        name: columns[0][name]
        for name in _PLACE
        if len({column.get(name) for column in columns}) == 1 and columns[0].get(name)
    }
    heads = [_head(column, shared) for column in columns]
    rows = [[label, *cells] for label, cells in question["rows"].items()]
    place = f" {_place(shared)}." if shared else ""
    below = f"`{question['command']}`: {question['reading']}{place}"
    table = _table([question.get("rows are", ""), *heads], rows)
    return "\n".join([f"## {question['question']}", *table, "", below, ""])


def _head(column: Mapping[str, str], shared: Mapping[str, str]) -> str:
    own = {name: value for name, value in column.items() if name not in shared}
    return "<br>".join(filter(None, [own.pop("shows", ""), own.pop("machine", ""), _place(own)]))


def _place(values: Mapping[str, Any]) -> str:
    texts = {"threads": "{} threads", "torch": "torch {}"}
    if values.get("threads") == 1:
        texts["threads"] = "{} thread"
    return ", ".join(
        texts.get(name, "{}").format(values[name]) for name in _PLACE if values.get(name)
    )


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def _torch_versions() -> str:
    lines = (RESULTS / "torch_versions.md").read_text().splitlines()
    table = [line.strip("|").split("|") for line in lines if line.startswith("|")]
    heads, _, *rows = [[cell.strip() for cell in row] for row in table]
    columns = {head: [row[n] for row in rows] for n, head in enumerate(heads)}
    shared = {head: cells[0] for head, cells in columns.items() if len({*cells}) == 1}
    own = {head: cells for head, cells in columns.items() if head not in shared}
    place = ", ".join(
        f"{head} {cell}" if head == "transformers" else cell for head, cell in shared.items()
    )
    below = "`make test-torch TORCH=all`: the main job with an empty store, then from the store."
    body = _table([*own], [*zip(*own.values(), strict=True)])
    return "\n".join(["## Which versions of torch?", *body, "", f"{below} {place}.", ""])


if __name__ == "__main__":
    PAGE.write_text(page())
