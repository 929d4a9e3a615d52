"""The table of torch versions: rows are replaced by version, and failures are reported."""

from __future__ import annotations

from typing import Any

import pytest
import torch_versions as table


def test_a_row_updates_that_of_its_version() -> None:
    page = table.with_row("", {"torch": "2.15.0", "suite": "9 passed, 0 failed, 0 skipped"})
    page = table.with_row(page, {"torch": "2.9.1", "machine": "2 cores"})
    page = table.with_row(page, {"torch": "2.15.0", "cold start": "81.5 s"})
    rows = [line for line in page.splitlines() if line.startswith("| 2")]
    assert [row.split(" | ")[0] for row in rows] == ["| 2.9.1", "| 2.15.0"]
    assert "9 passed, 0 failed, 0 skipped | 81.5 s" in rows[1]
    assert page.startswith(table.HEADER)


def test_the_counts_of_pytest_are_read_from_its_last_line() -> None:
    tail = "FAILED tests/a.py\n= 1 failed, 8567 passed, 12 skipped, 2 errors in 9.1s ="
    assert table.suite_cell(tail) == "8,567 passed, 3 failed, 12 skipped"
    assert table.suite_cell("8 passed in 1s") == "8 passed, 0 failed, 0 skipped"
    assert table.suite_cell("INTERNALERROR> no such plugin") == "did not run"


def _report(**changes: Any) -> dict[str, Any]:
    times = {"p50": 19.04}
    buckets = [{"error": "", "steps": 3, "step_ms": {"p50": 1.0}}]
    buckets.append({"error": "", "steps": 90, "step_ms": times})
    report = {"graphs": 2, "graphs_loaded": 0, "compiled_graphs": 1, "mismatched_tokens": 0}
    return (
        report | {"compiles_after_warmup": 0, "warmup_seconds": 81.5, "buckets": buckets} | changes
    )


def test_two_starts_give_the_cells_of_the_main_job() -> None:
    cells = table.job_cells(_report(), _report(graphs_loaded=2, warmup_seconds=1.26))
    assert cells == {
        "main job": "2 graphs (1 compiled), 0 mismatches",
        "cold start": "81.5 s",
        "second start": "1.3 s",
        "decode step": "19.0 ms",
    }
    assert table.is_good(cells)


def test_a_main_job_that_compiles_late_is_reported() -> None:
    cells = table.job_cells(_report(compiles_after_warmup=1), _report())
    expected = "2 graphs (1 compiled), 1 compiles after warmup, 2 not from the store, 0 mismatches"
    assert cells["main job"] == expected


@pytest.mark.parametrize(
    "row",
    [
        {"main job": "18 graphs (2 compiled), 3 mismatches"},
        {"main job": "failed, exit code 2"},
        {"suite": "8,467 passed, 100 failed, 0 skipped"},
        {"suite": "8,467 passed, 10 failed, 0 skipped"},
        {"suite": "did not run"},
    ],
)
def test_a_failure_makes_the_row_bad(row: dict[str, str]) -> None:
    assert not table.is_good(row)


def test_constraints_without_the_pins_of_torch_keep_all_others() -> None:
    pins = "torch==2.13.0+cpu ; x\ntriton==3.9.0\ntransformers==5.23.0\nnumpy==2.4.6\n"
    assert table.constraints_for("2.15.0", pins) == "numpy==2.4.6\ntorch==2.15.0\n"
    assert table.constraints_for("2.11.0", pins) == "torch==2.11.0\nnumpy<2.4\n"
