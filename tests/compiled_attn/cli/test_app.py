from __future__ import annotations

import builtins
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer", reason="needs the extra cli")
pytest.importorskip("transformers", reason="needs the extra hf")

from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

import compiled_attn
from compiled_attn.cli import main
from compiled_attn.cli.live import ServingView, serving_view, status_line
from compiled_attn.cli.options import RunOptions
from compiled_attn.engine import Engine, StepInfo
from compiled_attn.hf.proof import CheckReport, Difference
from compiled_attn.ops import NativeOps
from graphs.backends.eager import EagerBackend
from graphs.capture.contract import Frozen

KEYS = {
    "graphs",
    "graph_breaks",
    "compiles_after_warmup",
    "fallbacks",
    "warmup_seconds",
    "requests",
    "generated_tokens",
    "tokens_per_second",
    "ttft_ms",
    "step_ms",
    "padding_waste",
    "preemptions",
    "blocks_high_water",
    "checked_requests",
    "mismatched_tokens",
    "torch",
    "backend",
}


@dataclass
class Outcome:
    code: int
    out: str
    err: str


Command = Callable[..., Outcome]


@pytest.fixture(autouse=True)
def _no_store_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compiled_attn.cli.store.default_store", lambda: tmp_path / "store")


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs the command as the console script does."""

    def run(*arguments: object) -> Outcome:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        assert isinstance(ended.value.code, int)
        return Outcome(ended.value.code, *capsys.readouterr())

    return run


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        initializer_range=0.2,
        eos_token_id=None,
    )
    path = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    rows = [f"{0.001 * i:.3f},{20 + 3 * i},{18 + i}" for i in range(6)]
    path.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *rows]) + "\n")
    return path


@pytest.fixture
def small(model_dir: Path, trace: Path) -> list[object]:
    """Options of a job that takes a second."""
    return [
        *("run", "--model", model_dir, "--trace", trace, "--backend", "eager"),
        *("--max-tokens-per-step", 32, "--max-seqs", 4, "--block-size", 8, "--max-graphs", 6),
    ]


def assert_refused(outcome: Outcome, *parts: str) -> None:
    """Exit code 2, and nothing but one line on stderr that holds all the parts."""
    lines = [line for line in outcome.err.splitlines() if line.startswith("compiled-attn: error:")]
    assert outcome.code == 2, outcome.err
    assert len(lines) == 1 and lines[0] == outcome.err.splitlines()[-1]
    for part in parts:
        assert part in lines[0]
    assert "Traceback" not in outcome.err
    assert outcome.out == ""


def test_a_run_serves_checks_and_writes_every_promised_key(
    command: Command, small: list[object], tmp_path: Path
) -> None:
    outcome = command(*small, "--check", 3, "--json", tmp_path / "result.json")
    assert outcome.code == 0, outcome.err
    result = json.loads((tmp_path / "result.json").read_text())
    assert set(result) >= KEYS
    assert set(result["ttft_ms"]) == set(result["step_ms"]) == {"p50", "p99", "max"}
    assert (result["requests"], result["generated_tokens"]) == (6, sum(range(18, 24)))
    assert (result["checked_requests"], result["mismatched_tokens"]) == (3, 0)
    assert (result["compiles_after_warmup"], result["graph_breaks"], result["fallbacks"]) == (
        0,
        0,
        0,
    )
    assert result["backend"] == "eager" and result["torch"] == torch.__version__
    assert re.search(r"mismatched tokens\W+0\b", outcome.out)
    assert "6 requests, lengths scaled by 1: 165 prompt tokens, 123 to generate" in outcome.err


@pytest.mark.parametrize(
    ("kernel", "axes"),
    [("native", ("tokens", "requests")), ("portable", ("tokens", "shared", "unique", "logits"))],
)
def test_a_run_writes_its_report_and_the_demand_that_a_plan_is_made_from(
    command: Command, small: list[object], tmp_path: Path, kernel: str, axes: tuple[str, ...]
) -> None:
    demand, result = tmp_path / "demand.jsonl", tmp_path / "result.json"
    outcome = command(
        *small, "--kernel", kernel, "--defrag-waste", 0, "--record-demand", demand,
        "--report", tmp_path / "report", "--json", result,
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    steps = [json.loads(line) for line in demand.read_text().splitlines()]
    figures = json.loads(result.read_text())
    assert len(steps) == figures["steps"]
    assert all(set(step) == set(axes) for step in steps)
    assert sum(step["tokens"] for step in steps) == figures["computed_tokens"]
    assert figures["memory"]["defrag_moves"] > 0
    page = (tmp_path / "report" / "report.html").read_text()
    assert "<svg" in page and "http://" not in page.replace("http://www.w3.org", "")


def test_json_and_report_say_what_was_served_how_and_on_what(
    command: Command, small: list[object], model_dir: Path, tmp_path: Path
) -> None:
    outputs = ["--json", tmp_path / "result.json", "--report", tmp_path / "page"]
    assert command(*small, "--top-p", 0.5, *outputs).code == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["model"] == {
        "class": "LlamaForCausalLM",
        "source": str(model_dir),
        "parameters": sum(
            p.numel() for p in LlamaForCausalLM.from_pretrained(model_dir).parameters()
        ),
    }
    assert (result["dtype"], result["threads"]) == ("float32", torch.get_num_threads())
    options = result["options"]
    assert (options["top_p"], options["max_seqs"], options["backend"]) == (0.5, 4, "eager")
    assert options["model"] == str(model_dir) and options["num_blocks"] is None
    assert set(options) == {field.name for field in fields(RunOptions)}
    assert result["machine"]["cpu"] and result["versions"]["compiled-attn"]
    assert result["date"].endswith("+00:00")
    page = (tmp_path / "page" / "report.html").read_text()
    for told in (result["date"], "LlamaForCausalLM", result["machine"]["cpu"], str(model_dir)):
        assert told in page


@pytest.mark.parametrize(("checks", "shown"), [(0, "–"), (2, "0")])
def test_mismatches_are_a_dash_where_nothing_was_checked(
    command: Command, small: list[object], tmp_path: Path, checks: int, shown: str
) -> None:
    outcome = command(*small, "--check", checks, "--report", tmp_path / "page")
    assert outcome.code == 0
    terminal = "-" if shown == "–" else shown
    assert re.search(rf"mismatched tokens\W+{terminal}\s*│?\n", outcome.out)
    page = (tmp_path / "page" / "report.html").read_text()
    assert re.search(rf"mismatched tokens</dt>\s*<dd[^>]*>{shown}<", page)


def test_a_small_pool_forces_preemptions_and_changes_no_token(
    command: Command, small: list[object], tmp_path: Path
) -> None:
    path = tmp_path / "result.json"
    outcome = command(*small, "--num-blocks", 10, "--check", 6, "--json", path)
    result = json.loads(path.read_text())
    assert outcome.code == 0, outcome.err
    assert result["preemptions"] > 0
    assert (result["checked_requests"], result["mismatched_tokens"]) == (6, 0)


@pytest.mark.parametrize("kernel", ["auto", "native", "portable"])
def test_the_kernel_and_why_it_was_taken_are_in_table_and_report(
    command: Command, small: list[object], tmp_path: Path, kernel: str
) -> None:
    path = tmp_path / "result.json"
    outcome = command(*small, "--kernel", kernel, "--check", 3, "--json", path)
    assert outcome.code == 0, outcome.err
    result = json.loads(path.read_text())
    wanted = "sdpa" if kernel == "portable" else "native"
    assert (result["kernel"], result["mismatched_tokens"]) == (wanted, 0)
    note = result["kernel_notes"]["native"]
    assert note and re.search(rf"kernel\W+{wanted}\b.*{re.escape(note)}", outcome.out)


def test_why_a_kernel_could_not_be_built_is_told_whole_and_counts_as_a_fallback(
    command: Command, small: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    why = "expected g++ to build the kernel, but it failed (1): " + "a long reason; " * 9 + "end"
    failed = NativeOps("compiled_attn", "reference", why_not_native=why)
    monkeypatch.setattr("compiled_attn.engine.kernel.load", lambda: failed)
    path = tmp_path / "result.json"
    outcome = command(*small, "--no-strict", "--json", path)
    assert outcome.code == 0 and f"native kernel: {why}\n" in outcome.out
    assert json.loads(path.read_text())["fallbacks"] == 1
    refused = command(*small)
    assert_refused(refused, why, "--kernel portable")
    assert refused.err.count("portable") == 2  # one remedy, in Python's words and the command's


def test_an_unknown_kernel_is_refused(command: Command, small: list[object]) -> None:
    assert_refused(command(*small, "--kernel", "cuda"), "'auto', 'native', 'portable'", "cuda")


def test_the_default_model_serves_a_drawn_demand(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    outcome = command(
        *("run", "--backend", "eager", "--requests", 3, "--scale", 0.02, "--max-graphs", 2),
        *("--demand", "rag", "--num-blocks", 200, "--check", 1, "--json", path),
    )
    assert outcome.code == 0, outcome.err
    assert json.loads(path.read_text())["checked_requests"] == 1


def test_open_and_closed_loop_and_sampling_serve_all_requests(
    command: Command, small: list[object]
) -> None:
    for options in (
        ["--speed", 2],
        ["--concurrency", 1],
        ["--temperature", 0.8, "--top-k", 20, "--top-p", 0.9],
        ["--dtype", "bfloat16", "--no-strict"],
    ):
        outcome = command(*small, *options)
        assert outcome.code == 0, outcome.err
        assert re.search(r"requests\W+6\b", outcome.out)


def test_a_bucket_file_says_what_is_captured(
    command: Command, small: list[object], tmp_path: Path
) -> None:
    buckets, path = tmp_path / "buckets", tmp_path / "result.json"
    buckets.write_text("axes: tokens shared unique logits\n[4, 32], [0, 32], 128, 4\n")
    outcome = command(*small[:-2], "--buckets", buckets, "--json", path)
    assert outcome.code == 0, outcome.err
    assert json.loads(path.read_text())["graphs"] == 4


def test_a_run_tells_how_many_graphs_came_from_the_store(
    command: Command, small: list[object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Loading(EagerBackend):
        def capture(self, *args: Any, **kwargs: Any) -> Frozen:
            return replace(super().capture(*args, **kwargs), is_loaded=True)

    @contextmanager
    def stored(backend: str, store: Path | None) -> Iterator[Loading]:
        assert store == tmp_path / "mine"
        yield Loading()

    monkeypatch.setattr("compiled_attn.cli.run.stored_backend", stored)
    path = tmp_path / "result.json"
    outcome = command(*small, "--store", tmp_path / "mine", "--json", path)
    result = json.loads(path.read_text())
    assert outcome.code == 0 and f"{result['graphs']} from the store" in outcome.out
    assert result["graphs_loaded"] == result["graphs"] > 1
    assert all(row["from_store"] for row in result["buckets"])
    assert result["backend"] == "eager"
    command(*small, "--no-store", "--json", path)
    assert json.loads(path.read_text())["graphs_loaded"] == 0


@pytest.mark.slow
def test_a_second_start_loads_every_graph_and_serves_the_same_tokens(
    command: Command, small: list[object], tmp_path: Path
) -> None:
    path, job = tmp_path / "result.json", [*small[:6], "inductor", *small[7:-1], 2]
    job += ["--warmup-workers", 2]
    results = []
    for _ in range(2):
        outcome = command(*job, "--check", 2, "--json", path)
        assert outcome.code == 0, outcome.err
        results.append(json.loads(path.read_text()))
    assert [r["graphs_loaded"] for r in results] == [0, 2]
    assert [r["mismatched_tokens"] for r in results] == [0, 0]
    assert (tmp_path / "store" / "artifacts").is_dir()


def test_a_journal_is_written_and_one_of_another_warmup_is_refused(
    command: Command, small: list[object], tmp_path: Path
) -> None:
    journal = tmp_path / "warmup.jsonl"
    assert command(*small, "--warmup-journal", journal).code == 0
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    assert (lines[0]["name"], lines[0]["backend"]) == ("step", "eager")
    assert lines[-1]["status"] == "captured"
    other = [*small[:6], "aot_eager", *small[7:]]
    assert_refused(command(*other, "--warmup-journal", journal), "has backend 'eager'")


def test_a_mismatch_is_shown_with_both_logits_and_fails_the_run(
    command: Command, small: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    difference = Difference(3, 7, 11, 12, 0.5, 0.25)
    report = CheckReport(1, 9, 2, mismatches=[difference], ties=[difference])
    monkeypatch.setattr("compiled_attn.cli.run.check", lambda *_, **__: report)
    outcome = command(*small, "--check", 1)
    assert outcome.code == 1
    assert f"mismatch: {difference}" in outcome.out and f"tie: {difference}" in outcome.out


def test_an_interrupt_ends_cleanly_with_the_report_so_far(
    command: Command, small: list[object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    generate = Engine.generate

    def interrupted(self: Engine, *args: Any, **kwargs: Any) -> Any:
        results = generate(self, *args, **kwargs)
        yield next(results)
        yield next(results)
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "generate", interrupted)
    outcome = command(*small, "--check", 2, "--json", tmp_path / "result.json")
    result = json.loads((tmp_path / "result.json").read_text())
    assert outcome.code == 130
    assert result["requests"] >= 2 and result["checked_requests"] == 0
    assert "interrupted; this is the report so far" in outcome.err
    assert "Traceback" not in outcome.err


def test_an_interrupted_warmup_reports_too(
    command: Command, small: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "warmup", interrupt)
    outcome = command(*small)
    assert outcome.code == 130
    assert re.search(r"graphs captured\W+0 in", outcome.out)


def test_a_model_that_cannot_compute_a_step_is_refused_with_the_cause(
    command: Command, small: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise NotImplementedError("no kernel for this model")

    monkeypatch.setattr("compiled_attn.hf.attention.unified_attention", broken)
    outcome = command(*small)
    assert_refused(outcome, "fails on a flattened step", "no kernel for this model")


def test_a_compile_while_serving_fails_the_run_with_its_cause_and_report(
    command: Command, small: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_an_unknown_or_unreadable_model_is_refused(command: Command, tmp_path: Path) -> None:
    outcome = command("run", "--model", tmp_path / "none")
    assert_refused(outcome, str(tmp_path / "none"), "no such directory")
    (tmp_path / "config.json").write_text("{oops")
    assert_refused(command("run", "--model", tmp_path), "not a valid JSON file")


def test_a_bad_trace_line_is_refused_with_its_number(
    command: Command, small: list[object], trace: Path
) -> None:
    trace.write_text(trace.read_text() + "9.0,-3,1\n")
    assert_refused(command(*small), f"{trace}, line 8: prompt_tokens", "got -3")
    small[4] = trace.parent / "none.csv"
    assert_refused(command(*small), "none.csv: cannot be read: No such file")


def test_a_request_beyond_the_context_is_refused(command: Command, small: list[object]) -> None:
    assert_refused(command(*small, "--scale", 9), "context 256", "scale")


def test_a_pool_too_small_for_one_request_is_refused(command: Command, small: list[object]) -> None:
    assert_refused(command(*small, "--num-blocks", 4), "3 blocks", "num_blocks", "at least")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("axes: tokens shared unique logits\n(32, 0, -8, 4)\n", ":2:"),
        ("axes: tokens blocks\n(32, 8)\n", "axes"),
        ("axes: tokens shared unique logits\n(32, 0, 1, 4)\n", "unique"),
    ],
)
def test_a_bad_bucket_file_is_refused(
    command: Command, small: list[object], tmp_path: Path, content: str, message: str
) -> None:
    path = tmp_path / "buckets"
    path.write_text(content)
    assert_refused(command(*small, "--buckets", path), message)


def test_more_buckets_than_graphs_are_refused(
    command: Command, small: list[object], tmp_path: Path
) -> None:
    path = tmp_path / "buckets"
    path.write_text("axes: tokens shared unique logits\n[2, 4, 8, 32], 32, 128, 4\n")
    assert_refused(command(*small, "--max-graphs", 3, "--buckets", path), "max_graphs", "4")


def test_a_missing_compiler_is_refused_with_the_remedy(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = "no working C++ compiler found; install one or use eager"
    monkeypatch.setattr(
        "compiled_attn.cli.inputs.available_backends", lambda: {"inductor": reason, "eager": None}
    )
    assert_refused(command("run"), "--backend inductor", reason)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--backend", "magic"], ["unknown --backend magic", "eager", "inductor"]),
        (["--dtype", "int4"], ["unknown --dtype int4", "float32, bfloat16"]),
        (["--demand", "poem"], ["unknown demand 'poem'", "chat, code, rag"]),
        (["--speed", "0"], ["--speed above 0"]),
        (["--requests", "0"], ["--requests"]),
        (["--requests", "few"], ["--requests"]),
        (["--scale", "-1"], ["scale must be a positive number, got -1.0"]),
        (["--max-seqs", "0"], ["max_seqs"]),
        (["--max-seqs", "300"], ["max_seqs", "max_tokens_per_step", "300"]),
        (["--num-blocks", "1"], ["num_blocks"]),
        (["--max-graphs", "0"], ["max_graphs"]),
        (["--temperature", "-1"], ["temperature", "-1.0"]),
        (["--top-p", "0"], ["top_p"]),
        (["--check", "2", "--temperature", "1"], ["--check compares greedy decoding"]),
        (["--json", "/nowhere/result.json"], ["/nowhere/result.json", "No such file or directory"]),
        (["--num-blocks", "99999999999"], ["not enough memory", "--num-blocks"]),
        (["--num-blocks", "9" * 20], ["not enough memory", "--num-blocks", " bytes, which this"]),
        (["--block-size", "9" * 20], ["not enough memory", "block_size", " bytes, which this"]),
        (
            ["--max-tokens-per-step", "9" * 20, "--kernel", "portable", "--num-blocks", "99999"],
            ["not enough memory", "--max-tokens-per-step"],
        ),
        (["--requests", "9" * 20], ["--requests"]),
        (["--seed", "9" * 30], ["--seed"]),
        (["--scale", "1e300"], ["choose a smaller scale"]),
        (["--trace", "x.csv", "--demand", "chat"], ["--trace and --demand"]),
        (["--store", "x", "--no-store"], ["--store and --no-store"]),
        (["--store", "/dev/null"], ["/dev/null"]),
        (["--warmup-workers", "0"], ["warmup_workers >= 1, got 0"]),
        (["--warmup-journal", "/dev/null/journal"], ["/dev/null"]),
        (["--colour"], ["--colour"]),
        (["surplus"], ["surplus"]),
    ],
)
def test_bad_options_are_refused_in_one_line(
    command: Command, options: list[str], parts: list[str]
) -> None:
    assert_refused(command("run", *options), *parts)


def test_an_unknown_command_is_refused(command: Command) -> None:
    assert_refused(command("serve"), "serve")


def test_without_a_command_the_help_is_shown(command: Command) -> None:
    outcome = command()
    assert "Usage: compiled-attn" in outcome.out and outcome.err == ""


def test_version_and_help(command: Command) -> None:
    outcome = command("--version")
    assert (outcome.code, outcome.out) == (0, f"compiled-attn {compiled_attn.__version__}\n")
    for arguments in (["--help"], ["run", "--help"]):
        assert command(*arguments).code == 0


def test_the_help_names_every_option_of_the_command(command: Command) -> None:
    names = (
        "model trace demand requests scale seed speed concurrency temperature top-k top-p dtype "
        "backend max-tokens-per-step max-seqs block-size num-blocks buckets max-graphs check "
        "strict no-strict report json store no-store warmup-workers warmup-journal"
    )
    text = command("run", "--help").out
    assert [name for name in names.split() if f"--{name}" not in text] == []


def test_without_its_extra_the_command_says_what_to_install(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without_typer(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "typer":
            raise ModuleNotFoundError("No module named 'typer'", name="typer")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_typer)
    assert_refused(command("--version"), "typer", "pip install 'compiled-attn[cli,hf]'")


def step(elapsed_s: float, finished: int = 1) -> StepInfo:
    return StepInfo(
        running=3,
        waiting=4,
        blocks_used=50,
        blocks_total=80,
        finished=finished,
        generated_tokens=1200,
        elapsed_s=elapsed_s,
    )


def test_the_status_line_tells_speed_queue_and_blocks() -> None:
    assert status_line(step(2.0)) == "600 tokens/s, 3 running, 4 waiting, 50/80 blocks"
    assert status_line(step(0.0)).startswith("0 tokens/s")


def test_plain_output_is_a_line_now_and_then() -> None:
    stream = StringIO()
    with serving_view(9, Console(file=stream, width=40)) as view:
        assert type(view) is ServingView
        for seconds in (0.1, 4.9, 5.0, 6.0, 9.9, 10.2):
            view(step(seconds))
    assert stream.getvalue().splitlines() == [
        "5 s: 1/9 requests, 240 tokens/s, 3 running, 4 waiting, 50/80 blocks",
        "10 s: 1/9 requests, 118 tokens/s, 3 running, 4 waiting, 50/80 blocks",
    ]


def test_a_terminal_shows_one_live_line() -> None:
    stream = StringIO()
    console = Console(file=stream, force_terminal=True, width=120)
    with serving_view(9, console) as view:
        view(step(2.0, finished=9))
    assert "9/9" in stream.getvalue()
    assert "600 tokens/s, 3 running, 4 waiting, 50/80 blocks" in stream.getvalue()
