"""`python -m compiled_attn.planner`: from needs to a bucket file."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("typer", reason="needs the extra cli")

from compiled_attn.planner.command import run_command
from graphs import BucketResult, explicit, from_file
from graphs.warmup.journal import Journal


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_plan_writes_a_bucket_file_that_holds_every_need(tmp_path, capsys):
    needs = [{"rows": 1 + i % 7, "length": 10 * (1 + i % 13)} for i in range(200)]
    (tmp_path / "needs.jsonl").write_text("".join(f"{json.dumps(need)}\n" for need in needs))
    assert run_command(["needs.jsonl", "--max-graphs", "6", "--out", "plan.txt"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith(" buckets in plan.txt")
    space = from_file(tmp_path / "plan.txt")
    assert 1 <= len(space) <= 6 and set(space.names) == {"rows", "length"}
    assert all(space.pick(**need) for need in needs)


def test_plan_goes_by_what_a_warmup_has_measured(tmp_path, capsys):
    def measured(rows, run_seconds):
        bucket = {"rows": rows, "length": 64}
        return {"bucket": bucket, "status": "captured", "seconds": 2.0, "run_seconds": run_seconds}

    rows = [measured(1, 0.1), measured(32, 0.9)]
    (tmp_path / "warm.json").write_text(json.dumps({"buckets": rows}))
    needs = [{"rows": 1 + i % 32, "length": 64} for i in range(64)]
    (tmp_path / "needs.jsonl").write_text("".join(f"{json.dumps(need)}\n" for need in needs))
    options = ["--measured", "warm.json", "--max-seconds", "9", "--rho", "0", "--out", "plan.txt"]
    assert run_command(["needs.jsonl", *options]) == 0
    assert len(from_file(tmp_path / "plan.txt")) == 4  # at 2 seconds each


def _write(path, rows):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def _journal(tmp_path, space):
    """The journal of a warmup whose graphs take 1 MiB and 64 KiB a row, and have no timed run."""
    journal = Journal(tmp_path / "journal", "double", "eager", space.names)
    for bucket in space:
        journal.start(bucket)
        grown = (1 << 20) + (bucket["rows"] << 16)
        journal.done(BucketResult(bucket, "captured", seconds=2.0, bytes=grown))
    return tmp_path / "journal"


def test_memory_is_limited_by_what_three_captures_of_a_journal_took(tmp_path, capsys):
    _journal(tmp_path, explicit(["rows"], [1, 16, 64]))
    with (tmp_path / "journal").open("a") as file:
        file.write('{"bucket": {"rows')  # the process was killed
    _write(tmp_path / "needs.jsonl", [{"rows": 1 + i % 64} for i in range(640)])
    options = ["--measured", "journal", "--max-bytes", "12MiB", "--rho", "0", "--out", "plan.txt"]
    assert run_command(["needs.jsonl", *options]) == 0
    out = capsys.readouterr().out
    assert "no run was timed" in out and "error of the fit 0%" in out
    space = from_file(tmp_path / "plan.txt")
    taken = sum((1 << 20) + (bucket["rows"] << 16) for bucket in space)
    assert taken <= 12 << 20
    assert len(space) == 3 and space.largest["rows"] == 64


def test_a_limit_that_nothing_measured_is_refused(tmp_path, capsys):
    _journal(tmp_path, explicit(["rows"], [1, 64]))
    _write(tmp_path / "needs.jsonl", [{"rows": 3}])
    assert run_command(["needs.jsonl", "--measured", "journal", "--max-bytes", "9MiB"]) == 2
    assert "journal: expected the bytes, from 0 on, of captures of 3 sizes" in (
        capsys.readouterr().err
    )
    assert run_command(["needs.jsonl", "--measured", "journal"]) == 2
    assert "no captured bucket whose run was timed" in capsys.readouterr().err


def test_a_warmup_without_a_timed_bucket_measures_nothing(tmp_path, capsys):
    (tmp_path / "warm.json").write_text('{"buckets": []}')
    assert run_command(["needs.jsonl", "--measured", "warm.json"]) == 2
    assert "no captured bucket whose run was timed" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content",
    [
        "[" * 100_000,
        '{"buckets": ' + "[" * 100_000,
        '{"buckets": [{"bucket": {"rows": 1}, "seconds": 1%s, "run_seconds": 1, "status": '
        '"captured"}]}' % ("0" * 400),
        '{"buckets": [{"bucket": {"rows": 1.5}, "seconds": 1, "run_seconds": 1, "status": '
        '"captured"}]}',
        '{"buckets": [{"bucket": {"rows": 1}, "seconds": 1, "run_seconds": NaN, "status": '
        '"captured"}]}',
    ],
)
def test_a_measurement_that_no_clock_can_have_made_is_refused(content, tmp_path, capsys):
    (tmp_path / "needs.jsonl").write_text('{"rows": 3}\n')
    (tmp_path / "measured.json").write_text(content)
    assert run_command(["needs.jsonl", "--measured", "measured.json"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("planner: error: measured.json: expected") and len(error) < 250


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["rows.txt", "--out", "."], "it is a directory, name a file"),
        (["none.jsonl"], "none.jsonl: not readable as a demand"),
        (["rows.txt"], "rows.txt:1: not valid JSON: "),
        (["rows.txt", "--max-seconds", "3"], "--max-seconds needs --measured"),
        (["rows.txt", "--max-bytes", "3GiB"], "--max-bytes needs --measured"),
        (["rows.txt", "--measured", "rows.txt", "--max-bytes", "3 lots"], "write it as 2GiB"),
        (["rows.txt", "--measured", "rows.txt", "--max-seconds", "-1"], "expected seconds above 0"),
        (["rows.txt", "--measured", "none.json"], "none.json: not readable as a warmup"),
        (["rows.txt", "--measured", "rows.txt"], "expected a file that `warmup --json`"),
    ],
)
def test_bad_input_is_one_line(options, message, tmp_path, capsys):
    (tmp_path / "rows.txt").write_text("axes: rows\n[2, 4]\n")
    assert run_command(options) == 2
    assert message in capsys.readouterr().err
