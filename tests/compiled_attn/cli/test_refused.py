"""Bad input of ``compiled-attn run``: one line, exit code 2; and its help."""

from __future__ import annotations

import builtins
from typing import Any

import pytest
import torch

import compiled_attn
from graphs.installation import install_command
from tests.compiled_attn.cli.commands import assert_refused


def test_an_unknown_or_unreadable_model_is_refused(command, tmp_path):
    completed = command("run", tmp_path / "none")
    assert_refused(completed, str(tmp_path / "none"), "no such directory")
    (tmp_path / "config.json").write_text("{oops")
    assert_refused(command("run", tmp_path), "not a valid JSON file")


def test_a_bad_trace_line_is_refused_with_its_number(command, small, trace):
    trace.write_text(trace.read_text() + "9.0,-3,1\n")
    assert_refused(command(*small), f"{trace}, line 8: prompt_tokens", "got -3")
    small[3] = trace.parent / "none.csv"
    assert_refused(command(*small), "none.csv: cannot be read: No such file")


def test_a_context_can_be_chosen_and_the_requests_fit_it(command, small):
    completed = command(*small, "--context", 40)
    assert completed.code == 0 and "lengths scaled by 0.5: " in completed.err
    assert_refused(command(*small, "--context", 40, "--scale", 1), "context 40", "scale")
    assert_refused(command(*small, "--context", 1), "context >= 2, got 1")
    assert_refused(command(*small, "--context", 999), "context", "256", "999")


@pytest.mark.parametrize("option", ["--json", "--record-demand"])
def test_a_result_that_cannot_be_written_is_refused_with_the_remedy(
    command, small, tmp_path, option
):
    path = tmp_path / "none" / "file"
    assert_refused(command(*small, option, path), f"{path}: No such file", "choose a path")


def test_more_threads_than_can_be_started_are_refused(command, small):
    assert_refused(command(*small, "--threads", 100_000), "--threads", "less than or equal to")


def test_a_pool_too_small_for_one_request_is_refused(command, small):
    assert_refused(command(*small, "--num-blocks", 4), "3 blocks", "num_blocks", "at least")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("axes: tokens shared unique logits\n(32, 0, -8, 4)\n", ":2:"),
        ("axes: tokens blocks\n(32, 8)\n", "axes"),
        ("axes: tokens shared unique logits\n(32, 0, 1, 4)\n", "unique"),
    ],
)
def test_a_bad_bucket_file_is_refused(command, small, tmp_path, content, message):
    path = tmp_path / "buckets"
    path.write_text(content)
    assert_refused(command(*small, "--buckets", path), message)


def test_more_buckets_than_graphs_are_refused(command, small, tmp_path):
    path = tmp_path / "buckets"
    path.write_text("axes: tokens shared unique logits\n[2, 4, 8, 32], 32, 128, 4\n")
    assert_refused(command(*small, "--max-graphs", 3, "--buckets", path), "max_graphs", "4")


def test_a_missing_compiler_is_refused_with_the_remedy(command, monkeypatch):
    reason = "no working C++ compiler found; install one or use eager"
    monkeypatch.setattr(
        "compiled_attn.cli.inputs.available_backends", lambda: {"inductor": reason, "eager": None}
    )
    assert_refused(command("run"), "--backend inductor", reason)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--kernel", "cuda"], ["'auto', 'native', 'portable'", "cuda"]),
        (["--backend", "magic"], ["unknown --backend magic", "eager", "inductor"]),
        (["--dtype", "int4"], ["unknown --dtype int4", "float32, bfloat16"]),
        (["--demand", "poem"], ["unknown demand 'poem'", "chat, code, rag"]),
        (["--speed", "0"], ["--speed above 0"]),
        (["--requests", "0"], ["--requests"]),
        (["--scale", "-1"], ["scale must be a positive number, got -1.0"]),
        (
            ["--max-seqs", "300", "--max-tokens-per-step", "256"],
            ["max_seqs", "max_tokens_per_step", "300"],
        ),
        (["--temperature", "-1"], ["temperature", "-1.0"]),
        (["--check", "2", "--temperature", "1"], ["--check compares greedy decoding"]),
        (["--num-blocks", "9" * 20], ["not enough memory", "--num-blocks", " bytes, which this"]),
        (["--block-size", "9" * 20], ["not enough memory", "block_size", " bytes, which this"]),
        (
            ["--max-tokens-per-step", "9" * 20, "--kernel", "portable", "--num-blocks", "99999"],
            ["not enough memory", "--max-tokens-per-step"],
        ),
        (["--num-blocks", "9", "--kv-memory", "1GiB"], ["num_blocks or kv_memory, got both"]),
        (["--kv-memory", "2G"], ["kv_memory in bytes", "GiB", "'2G'", "write it as 2GiB"]),
        (["--kv-memory", "99999999GiB"], ["not enough memory", "--kv-memory"]),
        (["--kv-dtype", "int4"], ["kv_dtype of ('auto', 'int8', 'fp8'), got 'int4'"]),
        (["--seed", "9" * 30], ["--seed"]),
        (["--scale", "1e300"], ["choose a smaller scale"]),
        (["--trace", "x.csv", "--demand", "chat"], ["--trace and --demand"]),
        (["--store", "x", "--no-store"], ["--store and --no-store"]),
        (["--store", "/dev/null"], ["/dev/null"]),
        (["--warmup-journal", "/dev/null/journal"], ["/dev/null"]),
        (["--colour"], ["--colour"]),
        (["surplus"], ["surplus"]),
    ],
)
def test_bad_options_are_refused_in_one_line(command, options, parts):
    assert_refused(command("run", *options), *parts)


def test_an_unknown_command_is_refused(command):
    assert_refused(command("moon"), "moon")


def test_version_and_help(command):
    completed = command("--version")
    version, features = completed.out.splitlines()
    assert (completed.code, version) == (0, f"compiled-attn {compiled_attn.__version__}")
    assert features.startswith(f"torch {torch.__version__}, features: ")
    for arguments in (["--help"], ["run", "--help"]):
        assert command(*arguments).code == 0


def test_without_its_extra_the_command_says_what_to_install(command, monkeypatch):
    real = builtins.__import__

    def without_typer(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "typer":
            raise ModuleNotFoundError("No module named 'typer'", name="typer")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_typer)
    assert_refused(command("--version"), "typer", install_command("cli", "hf"))
