"""``compiled-attn plan``: the table, the bucket file, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from compiled_attn.workloads import synthetic
from graphs import from_file

TRACES = Path(__file__).resolve().parents[4] / "shared" / "traces"
SMALL = [
    *("--kernel", "portable", "--max-tokens-per-step", "32", "--max-seqs", "4"),
    *("--block-size", "8"),
]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    rows = [
        {
            "arrival_s": a.arrival_s,
            "prompt_tokens": 1 + a.prompt_tokens // 64,
            "output_tokens": 1 + a.output_tokens // 16,
        }
        for a in synthetic("chat", 80)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _table(out: str) -> dict[str, tuple[int, float]]:
    """Buckets and waste of each strategy."""
    cells = [[c.strip() for c in re.split("[│┃]", line)[1:-1]] for line in out.splitlines()]
    rows = [row for row in cells if len(row) == 6 and row[1].isdigit()]
    return {row[0]: (int(row[1]), float(row[3].rstrip("%"))) for row in rows}


def test_a_plan_of_a_trace_wastes_less_than_every_ladder_and_run_reads_it(
    command, model_dir, trace, tmp_path
):
    out = tmp_path / "buckets.txt"
    limits = [model_dir, "--trace", trace, *SMALL]
    code, text, err = command("plan", *limits, "--max-graphs", 10, "--out", out)
    assert code == 0, err
    rows = _table(text)
    assert {"exponential", "unified ladder", "engine's default"} < rows.keys()
    assert all(buckets <= 10 for buckets, _ in rows.values())
    assert rows["fitted plan"][1] == min(waste for _, waste in rows.values())
    assert "80 requests, lengths scaled by 1: " in err and "simulated steps" in err
    assert "below 10,000 a plan says little" in text
    space = from_file(out)
    assert len(space) <= 10 and set(space.names) == {"tokens", "shared", "unique", "logits"}
    assert f"written: compiled-attn run --buckets {out}" in text

    result = tmp_path / "result.json"
    options = ["--backend", "eager", "--requests", 12, "--buckets", out, "--json", result]
    code, _, err = command("run", *limits, *options)
    assert code == 0, err
    result = json.loads(result.read_text())
    assert result["graphs"] == len(space) and result["fallbacks"] == 0


def test_a_recorded_demand_gives_the_same_plan_as_its_simulation(
    command, model_dir, trace, tmp_path
):
    recorded, planned, simulated = (tmp_path / name for name in ("demand", "a.txt", "b.txt"))
    limits = [model_dir, *SMALL, "--max-graphs", 8]
    served = ["--trace", trace, "--requests", 8]
    code, _, err = command(
        "run", *limits, *served, "--backend", "eager", "--record-demand", recorded
    )
    assert code == 0, err
    code, _, err = command("plan", *limits, "--rho", 0, "--demand", recorded, "--out", planned)
    assert code == 0, err
    code, _, err = command("plan", *limits, "--rho", 0, *served, "--out", simulated)
    assert code == 0, err
    assert planned.read_text() == simulated.read_text()


def test_a_plan_is_within_the_seconds_and_bytes_that_a_journal_measured(
    command, model_dir, trace, tmp_path
):
    journal, out = tmp_path / "journal", tmp_path / "buckets.txt"
    axes = ["tokens", "shared", "unique", "logits"]
    rows = [{"form": "graphs warmup journal", "version": 1, "axes": axes}]
    for tokens in (1, 16, 32):
        bucket = {"tokens": tokens, "shared": 4, "unique": 4, "logits": 4}
        row = {"bucket": bucket, "status": "captured", "seconds": 2.0, "bytes": 1 << 20}
        rows.append(row)
    journal.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = [model_dir, "--trace", trace, *SMALL, "--rho", 0, "--measured", journal]
    for limit, remark in (
        (["--max-seconds", 9], "8 s of warmup"),
        (["--max-bytes", "4MiB"], "4 MiB of graphs"),
    ):
        code, text, err = command("plan", *options, *limit, "--max-graphs", 20, "--out", out)
        assert code == 0, err
        assert len(from_file(out)) == 4 and remark in text


def test_needs_recorded_with_the_native_kernel_are_planned_over_its_axes(
    command, model_dir, tmp_path
):
    recorded, out = tmp_path / "demand", tmp_path / "buckets.txt"
    needs = [{"tokens": 1 + i % 32, "requests": 1 + i % 4} for i in range(64)]
    recorded.write_text("".join(json.dumps(need) + "\n" for need in needs if need["tokens"] > 4))
    options = [model_dir, *SMALL[2:], "--demand", recorded, "--max-graphs", 6]
    code, text, err = command("plan", *options, "--out", out)
    assert code == 0, err
    assert {"exponential", "engine's default", "fitted plan"} <= set(_table(text))
    space = from_file(out)
    assert set(space.names) == {"tokens", "requests"} and len(space) <= 6
    assert space.pick(tokens=32, requests=4).sizes == (32, 4)


@pytest.mark.parametrize("name", ["mooncake_conversation_tiny.jsonl"])
def test_a_real_trace_is_planned(command, name):
    if not (TRACES / name).exists():
        pytest.skip(f"there is no {TRACES / name}")
    code, text, err = command(
        "plan", "--trace", TRACES / name, "--kernel", "portable", "--max-graphs", 32, "--rho", 0
    )
    assert code == 0, err
    rows = _table(text)
    assert rows["fitted plan"][1] < rows["unified ladder"][1] / 3
    assert rows["fitted plan"][1] < rows["exponential"][1] / 3


@pytest.mark.parametrize("backend", ["onnxrt", "hpu"])
def test_a_plan_is_for_the_kernel_that_the_backend_can_have(
    command, model_dir, trace, tmp_path, backend
):
    out = tmp_path / "buckets.txt"
    options = [model_dir, "--trace", trace, *SMALL[2:], "--max-graphs", 4, "--out", out]
    code, text, err = command("plan", *options, "--backend", backend)
    assert code == 0, err
    assert text.startswith("for the portable kernel; native: ") and f"not of {backend}" in text
    assert set(from_file(out).names) == {"tokens", "shared", "unique", "logits"}
    code, _, err = command("plan", *options, "--backend", backend, "--kernel", "native")
    assert code == 2 and f"not of {backend}" in err


def test_a_plan_knows_the_dtype_of_the_cache(command, tmp_path):
    needs = tmp_path / "demand"
    needs.write_text('{"tokens": 1, "shared": 0, "unique": 3, "logits": 1}\n' * 3)
    sizes = []
    for dtype in ("float32", "bfloat16"):
        options = ["--demand", needs, "--dtype", dtype, "--max-graphs", 2, "--rho", 0]
        options += ["--max-seqs", 16, "--block-size", 8, "--out", tmp_path / dtype]
        code, _, err = command("plan", *options)
        assert code == 0, err
        sizes.append(from_file(tmp_path / dtype).largest["unique"])
    assert sizes[1] == 2 * sizes[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--trace", "none.csv", "--demand", "x"],
            "expected one of --trace and --demand, got both",
        ),
        ([], "expected one of --trace and --demand, got neither"),
        (["--trace", "none.csv"], "none.csv: cannot be read"),
        (["--demand", "none.jsonl"], "none.jsonl: not readable as a demand"),
        (["--demand", "rows.jsonl"], "rows.jsonl: expected needs over tokens, shared, unique, l"),
        (["--demand", "one.jsonl"], "expected two needs to halve a demand, got one"),
        (["--demand", "large.jsonl"], "tokens <= 256, got 999: pass the limits that `run` had"),
        (
            ["--demand", "rows4.jsonl", "--max-seqs", "3"],
            "logits <= 3, got 4: pass the limits that `run` had when it recorded them, --max-seqs",
        ),
        (["--demand", "native.jsonl"], "a demand of the portable kernel, got one of the native"),
        (["--demand", "one.jsonl", "--requests", "3"], "expected --requests with --trace only"),
        (["--trace", "good.csv", "--out", "."], "cannot write .: it is a directory, name a file"),
        (
            ["--trace", "good.csv", "--rho", "0.5"],
            "--rho above 1, or 0 for no guard, got 0.5",
        ),
        (["--trace", "good.csv", "--speed", "-1"], "expected speed above 0 or None, got -1"),
        (["--trace", "good.csv", "--scale", "1", "--context", "4"], "<= context 4, got"),
        (
            ["--trace", "good.csv", "--out", "no/where.txt"],
            "cannot write no/where.txt: no is not a directory",
        ),
        (["--trace", "good.csv", "nowhere"], "model nowhere: no such directory"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    command, options, message, model_dir, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("good.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,9,5\n1,20,3\n")
    Path("rows.jsonl").write_text('{"rows": 3}\n')
    Path("one.jsonl").write_text('{"tokens": 1, "shared": 0, "unique": 3, "logits": 1}\n')
    Path("native.jsonl").write_text('{"tokens": 1, "requests": 1}\n')
    Path("rows4.jsonl").write_text('{"tokens": 9, "shared": 0, "unique": 3, "logits": 4}\n')
    Path("large.jsonl").write_text('{"tokens": 999, "shared": 0, "unique": 3, "logits": 1}\n')
    if "nowhere" not in options:
        options = [*options, model_dir]
    options = [*options, "--kernel", "portable"]
    code, _, err = command("plan", *options)
    assert code == 2
    errors = [line for line in err.splitlines() if line.startswith("compiled-attn: error:")]
    assert len(errors) == 1 and message in errors[0], err
    assert "Traceback" not in err
