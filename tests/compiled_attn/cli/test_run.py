"""``compiled-attn run``: what it serves, proves and writes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from compiled_attn.cli.options import RunOptions
from compiled_attn.engine import Engine
from compiled_attn.models.hf.proof import CheckReport, Difference
from compiled_attn.ops import NativeOps
from graphs.backends.eager import EagerBackend
from graphs.capture.contract import Frozen
from tests.compiled_attn.cli.commands import assert_refused


def test_a_run_serves_checks_and_writes_its_report(command, small, tmp_path):
    completed = command(*small, "--check", 3, "--json", tmp_path / "result.json")
    assert completed.code == 0, completed.err
    result = json.loads((tmp_path / "result.json").read_text())
    assert set(result["ttft_ms"]) == set(result["step_ms"]) == {"p50", "p99", "max"}
    assert (result["requests"], result["generated_tokens"]) == (6, sum(range(18, 24)))
    assert (result["checked_requests"], result["mismatched_tokens"]) == (3, 0)
    for name in ("compiles_after_warmup", "graph_breaks", "fallbacks", "preemptions"):
        assert result[name] == 0
    assert result["backend"] == "eager" and result["torch"] == torch.__version__
    assert result["ranks"] == 1 and re.search(r"ranks\W+1\b", completed.out)
    assert re.search(r"mismatched tokens\W+0\b", completed.out)
    assert "6 requests, lengths scaled by 1: 165 prompt tokens, 123 to generate" in completed.err


def test_the_next_run_has_buckets_for_the_sizes_of_this_one(command, small, tmp_path):
    sizes, result = tmp_path / "sizes.jsonl", tmp_path / "result.json"
    found = []
    for _ in range(2):
        completed = command(*small, "--learn-buckets", sizes, "--json", result)
        assert completed.code == 0, completed.err
        found.append(json.loads(result.read_text()))
    first, second = ({each["bucket"] for each in run["buckets"]} for run in found)
    assert second > first and len(second) == len(first) + 2  # a third of six
    recorded = [json.loads(line) for line in sizes.read_text().splitlines()]
    assert sum(row["count"] for row in recorded) == found[0]["steps"] + found[1]["steps"]
    sizes.write_text("axes: tokens\n")
    assert_refused(command(*small, "--learn-buckets", sizes), "sizes.jsonl:1: not valid JSON")


@pytest.mark.parametrize(
    ("kernel", "axes"),
    [("native", ("tokens", "requests")), ("portable", ("tokens", "shared", "unique", "logits"))],
)
def test_a_run_writes_its_report_and_the_demand_that_a_plan_is_made_from(
    command, small, tmp_path, kernel, axes
):
    demand, result = tmp_path / "demand.jsonl", tmp_path / "result.json"
    completed = command(
        *small, "--kernel", kernel, "--defrag-waste", 0, "--record-demand", demand,
        "--report", tmp_path / "report", "--json", result,
    )  # fmt: skip
    assert completed.code == 0, completed.err
    steps = [json.loads(line) for line in demand.read_text().splitlines()]
    figures = json.loads(result.read_text())
    assert len(steps) == figures["steps"]
    assert all(set(step) == set(axes) for step in steps)
    assert sum(step["tokens"] for step in steps) == figures["computed_tokens"]
    assert figures["memory"]["defrag_moves"] > 0
    page = (tmp_path / "report" / "report.html").read_text()
    assert "<svg" in page and "http://" not in page.replace("http://www.w3.org", "")


@pytest.mark.usefixtures("one_thread")
def test_json_and_report_say_what_was_served_how_and_on_what(command, small, model_dir, tmp_path):
    outputs = ["--json", tmp_path / "result.json", "--report", tmp_path / "page"]
    completed = command(*small, "--top-p", 0.5, "--threads", 2, *outputs)
    assert completed.code == 0
    assert "threads: 2; waiting: as it was when torch was loaded\n" in completed.err
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["model"] == {
        "class": "LlamaForCausalLM",
        "source": str(model_dir),
        "parameters": sum(
            p.numel() for p in LlamaForCausalLM.from_pretrained(model_dir).parameters()
        ),
    }
    assert (result["dtype"], result["threads"]) == ("float32", 2)
    assert result["waiting"] == "as it was when torch was loaded"
    options = result["options"]
    assert (options["top_p"], options["max_seqs"], options["backend"]) == (0.5, 4, "eager")
    assert options["model"] == str(model_dir) and options["num_blocks"] is None
    assert set(options) == {field.name for field in fields(RunOptions)}
    assert result["machine"]["cpu"] and result["versions"]["compiled-attn"]
    assert result["date"].endswith("+00:00")
    page = (tmp_path / "page" / "report.html").read_text()
    for shown in (result["date"], "LlamaForCausalLM", result["machine"]["cpu"], str(model_dir)):
        assert shown in page


@pytest.mark.parametrize(("checks", "shown"), [(0, "–"), (2, "0")])
def test_mismatches_are_a_dash_where_nothing_was_checked(command, small, tmp_path, checks, shown):
    completed = command(*small, "--check", checks, "--report", tmp_path / "page")
    assert completed.code == 0
    terminal = "-" if shown == "–" else shown
    assert re.search(rf"mismatched tokens\W+{terminal}\s*│?\n", completed.out)
    page = (tmp_path / "page" / "report.html").read_text()
    assert re.search(rf"mismatched tokens</dt>\s*<dd[^>]*>{shown}<", page)


def test_a_small_pool_forces_preemptions_and_changes_no_token(command, small, tmp_path):
    path = tmp_path / "result.json"
    completed = command(*small, "--num-blocks", 10, "--check", 6, "--json", path)
    result = json.loads(path.read_text())
    assert completed.code == 0, completed.err
    assert result["preemptions"] > 0
    assert (result["checked_requests"], result["mismatched_tokens"]) == (6, 0)


def test_a_run_with_drafts_counts_them(command, small, tmp_path):
    path = tmp_path / "result.json"
    completed = command(*small, "--speculate", "ngram:2", "--check", 6, "--json", path)
    assert completed.code == 0, completed.err
    result = json.loads(path.read_text())
    assert (result["checked_requests"], result["mismatched_tokens"]) == (6, 0)
    drafted, accepted = (result["drafts"][kind] for kind in ("drafted", "accepted"))
    assert len(drafted) == len(accepted) == 2
    row = rf"accepted tokens of drafts\W+{sum(accepted)} of {sum(drafted)}\b"
    assert re.search(row, completed.out)


@pytest.mark.parametrize(("kind", "dtype"), [("int8", "int8"), ("fp8", "float8_e4m3fn")])
def test_a_run_in_8_bits_passes_its_check_and_says_what_the_cache_is(
    command, small, tmp_path, kind, dtype
):
    path = tmp_path / "result.json"
    completed = command(
        *small, "--kv-dtype", kind, "--kv-memory", "40KiB", "--check", 6, "--json", path
    )
    assert completed.code == 0, completed.err
    result = json.loads(path.read_text())
    assert (result["checked_requests"], result["mismatched_tokens"]) == (6, 0)
    cache = result["kv_cache"]
    assert (cache["dtype"], cache["why"]) == (dtype, "kv_memory")
    block = 2 * 2 * (16 + 4) * 8  # keys and values of 2 layers, 16 bytes and a scale, 8 tokens
    assert (cache["blocks"], cache["tokens"]) == (40 * 1024 // block, (40 * 1024 // block - 1) * 8)
    assert re.search(rf"KV cache\W+{dtype}, {cache['tokens']:,} tokens in 0.0 MiB", completed.out)
    assert re.search(r"its size is that of\W+kv_memory\b", completed.out)
    ties = len(result["ties"])
    shown = f"0, {ties} ties in {sum(range(18, 24))}" if ties else "0"
    assert re.search(rf"mismatched tokens\W+{shown}\s*│?\n", completed.out)


def test_a_run_with_weights_of_int8_says_how_many_tokens_that_changed(command, small, tmp_path):
    path = tmp_path / "result.json"
    options = "--dtype", "bfloat16", "--weights", "int8", "--check", 3, "--json", path
    completed = command(*small, *options)
    assert completed.code == 0, completed.err
    result = json.loads(path.read_text())
    assert (result["checked_requests"], result["mismatched_tokens"]) == (3, 0)
    assert result["kernel_notes"]["weights"].endswith("in int8")
    shown = re.search(
        r"int8: (\d+) of (\d+) tokens differ from those of weights in bfloat16", completed.err
    )
    assert shown is not None
    assert result["tokens_others_in_int8"] == int(shown[1]) <= int(shown[2])


@pytest.mark.parametrize("kernel", ["auto", "native", "portable"])
def test_the_kernel_and_why_it_was_taken_are_in_table_and_report(command, small, tmp_path, kernel):
    path = tmp_path / "result.json"
    completed = command(*small, "--kernel", kernel, "--check", 3, "--json", path)
    assert completed.code == 0, completed.err
    result = json.loads(path.read_text())
    expected = "sdpa" if kernel == "portable" else "native"
    assert (result["kernel"], result["mismatched_tokens"]) == (expected, 0)
    note = result["kernel_notes"]["native"]
    assert note and re.search(rf"kernel\W+{expected}\b.*{re.escape(note)}", completed.out)


def test_why_a_kernel_could_not_be_built_is_shown_and_counts_as_a_fallback(
    command, small, tmp_path, monkeypatch
):
    why = "expected g++ to build the kernel, but it failed (1): " + "a long reason; " * 9 + "end"
    failed = NativeOps("compiled_attn", "reference", why_not_native=why)
    monkeypatch.setattr("compiled_attn.engine.kernel.load", lambda: failed)
    path = tmp_path / "result.json"
    completed = command(*small, "--no-strict", "--json", path)
    assert completed.code == 0 and f"native kernel: {why}\n" in completed.out
    assert json.loads(path.read_text())["fallbacks"] == 1
    refused = command(*small)
    assert_refused(refused, why, "--kernel portable")
    assert refused.err.count("portable") == 2  # one remedy, in Python's words and the command's


def test_contexts_of_one_process_cannot_be_divided(command, small):
    assert_refused(command(*small, "--context-parallel"), "got one process", "torchrun")


def test_the_default_model_serves_synthetic_requests(command, tmp_path):
    path = tmp_path / "result.json"
    completed = command(
        *("run", "--backend", "eager", "--requests", 3, "--scale", 0.02, "--max-graphs", 2),
        *("--demand", "rag", "--num-blocks", 200, "--check", 1, "--json", path),
    )
    assert completed.code == 0, completed.err
    assert json.loads(path.read_text())["checked_requests"] == 1


def test_open_and_closed_loop_and_sampling_serve_all_requests(command, small):
    for options in (
        ["--speed", 2],
        ["--concurrency", 1],
        ["--temperature", 0.8, "--top-k", 20, "--top-p", 0.9],
        ["--dtype", "bfloat16", "--no-strict"],
    ):
        completed = command(*small, *options)
        assert completed.code == 0, completed.err
        assert re.search(r"requests\W+6\b", completed.out)


def test_a_run_shows_how_many_graphs_came_from_the_store(command, small, monkeypatch, tmp_path):
    class Loading(EagerBackend):
        def capture(self, *args: Any, **kwargs: Any) -> Frozen:
            return replace(super().capture(*args, **kwargs), is_loaded=True)

    @contextmanager
    def stored(backend: str, store: Path | None) -> Iterator[Loading]:
        assert store == tmp_path / "mine"
        yield Loading()

    monkeypatch.setattr("compiled_attn.cli.run.stored_backend", stored)
    path = tmp_path / "result.json"
    completed = command(*small, "--store", tmp_path / "mine", "--json", path)
    result = json.loads(path.read_text())
    assert completed.code == 0 and f"{result['graphs']} from the store" in completed.out
    assert result["graphs_loaded"] == result["graphs"] > 1
    assert all(row["from_store"] for row in result["buckets"])
    assert result["backend"] == "eager"
    command(*small, "--no-store", "--json", path)
    assert json.loads(path.read_text())["graphs_loaded"] == 0


@pytest.mark.slow
def test_a_second_start_loads_every_graph_and_serves_the_same_tokens(command, small, tmp_path):
    path, job = tmp_path / "result.json", [*small[:6], "inductor", *small[7:-1], 2]
    results = []
    for _ in range(2):
        completed = command(*job, "--check", 2, "--json", path)
        assert completed.code == 0, completed.err
        results.append(json.loads(path.read_text()))
    assert [r["graphs_loaded"] for r in results] == [0, 2]
    assert [r["mismatched_tokens"] for r in results] == [0, 0]
    assert (tmp_path / "store" / "artifacts").is_dir()


def test_a_journal_is_written_and_one_of_another_warmup_is_refused(command, small, tmp_path):
    journal = tmp_path / "warmup.jsonl"
    assert command(*small, "--warmup-journal", journal).code == 0
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    assert (lines[0]["name"], lines[0]["backend"]) == ("step", "eager")
    assert lines[-1]["status"] == "captured"
    other = [*small[:5], "aot_eager", *small[6:]]
    assert_refused(command(*other, "--warmup-journal", journal), "has backend 'eager'")


def test_a_mismatch_is_shown_with_both_logits_and_fails_the_run(command, small, monkeypatch):
    difference = Difference(3, 7, 11, 12, 0.5, 0.25)
    report = CheckReport(1, 9, 2, mismatches=[difference], ties=[difference])
    monkeypatch.setattr("compiled_attn.cli.run.check", lambda *_, **__: report)
    completed = command(*small, "--check", 1)
    assert completed.code == 1
    assert f"mismatch: {difference}" in completed.out and f"tie: {difference}" in completed.out


def test_an_interrupt_ends_cleanly_with_the_report_so_far(command, small, monkeypatch, tmp_path):
    generate = Engine.generate

    def interrupted(self: Engine, *args: Any, **kwargs: Any) -> Any:
        results = generate(self, *args, **kwargs)
        yield next(results)
        yield next(results)
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "generate", interrupted)
    completed = command(*small, "--check", 2, "--json", tmp_path / "result.json")
    result = json.loads((tmp_path / "result.json").read_text())
    assert completed.code == 130
    assert result["requests"] >= 2 and result["checked_requests"] == 0
    assert "interrupted; this is the report so far" in completed.err
    assert "Traceback" not in completed.err


def test_a_model_that_cannot_compute_a_step_is_refused_with_the_cause(command, small, monkeypatch):
    def broken(*_: object, **__: object) -> None:
        raise NotImplementedError("no kernel for this model")

    monkeypatch.setattr("compiled_attn.models.hf.attention.unified_attention", broken)
    completed = command(*small)
    assert_refused(completed, "fails on a flattened step", "no kernel for this model")


def test_a_compile_while_serving_fails_the_run_with_its_cause_and_report(
    command, small, monkeypatch
):
    advance = Engine.advance

    def compiling(self: Engine) -> None:
        with self.sentinel:
            torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
        advance(self)

    monkeypatch.setattr(Engine, "advance", compiling)
    strict, loose = command(*small), command(*small, "--no-strict")
    assert strict.code == 1 and "expected nothing to compile any more" in strict.err
    assert re.search(r"requests\W+0\b", strict.out)
    assert loose.code == 0 and re.search(r"compiles after warmup\W+[1-9]", loose.out)
