"""``compiled-attn plan --format``: another engine's buckets in its syntax, and what is refused."""

from __future__ import annotations

import json

import pytest

from tests.compiled_attn.cli.commands import assert_refused

LIMITS = ["--max-seqs", 4, "--max-tokens-per-step", 64, "--block-size", 8, "--max-graphs", 6]


def test_sizes_for_vllm_are_written_and_how_to_use_them_is_told(command, trace, tmp_path):
    out = tmp_path / "vllm.json"
    code, text, err = command("plan", "--format", "vllm", "--trace", trace, *LIMITS, "--out", out)
    assert code == 0, err
    config = json.loads(out.read_text())
    sizes = config["cudagraph_capture_sizes"]
    assert sizes == sorted(set(sizes)) and sizes[-1] == 8 and len(sizes) <= 6
    assert "vllm's default" in text
    assert f'written: vllm serve MODEL --compilation-config "$(cat {out})"' in text
    assert "syntax and picking rule: " in text and "vllm 0.32.* or 0.33.*" in text


def test_without_out_the_option_for_sglang_is_the_last_line(command, trace):
    code, text, err = command("plan", "--format", "sglang", "--trace", trace, *LIMITS)
    assert code == 0, err
    option, *sizes = text.splitlines()[-1].split()
    assert option == "--cuda-graph-bs" and sizes[-1] == "4"


def test_sizes_for_ascend_are_as_many_as_its_streams_allow(command, trace):
    plan = ["plan", "--format", "vllm-ascend", "--trace", trace, "--max-seqs", 64]
    code, text, err = command(*plan, "--layers", 48, "--comm-groups", 1, "--streams", 900)
    assert code == 0, err
    assert "streams for 5 sizes: 48 layers, 1 groups" in text
    assert len(json.loads(text.splitlines()[-1])["cudagraph_capture_sizes"]) <= 5


@pytest.mark.parametrize("name", ["tensorrt-llm", "tpu-inference", "transformers"])
def test_a_plan_for_each_other_engine_is_printed(command, trace, name):
    code, text, err = command("plan", "--format", name, "--trace", trace, *LIMITS)
    assert code == 0, err
    assert f"{name}'s default" in text and "syntax and picking rule: " in text


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--format", "vllm-ascend", "--trace", "TRACE"], ["expected --layers with --format"]),
        (["--format", "vllm", "--trace", "TRACE", "--layers", 3], ["expected no --layers"]),
        (["--format", "vllm", "--max-bytes", "2GiB"], ["expected --max-bytes without --format"]),
        (
            ["--format", "vllm-ascend", "--trace", "TRACE", "--layers", 3000],
            ["expected streams for a capture of 3000 layers", "got 1800: run without graphs"],
        ),
        (["--format", "tensorrt"], ["expected --format of vllm, vllm-gaudi, sglang", "tensorrt"]),
        (["--format", "vllm"], ["expected --trace, and no --demand, with --format"]),
        (["--format", "vllm", "--trace", "missing"], ["missing: cannot be read"]),
    ],
)
def test_what_cannot_be_planned_is_one_line(command, trace, options, parts):
    options = [trace if each == "TRACE" else each for each in options]
    assert_refused(command("plan", *options), *parts)


def test_an_engine_of_another_version_is_one_line_with_the_tested_range(
    command, trace, monkeypatch
):
    from compiled_attn.cli import plan_for

    monkeypatch.setattr(plan_for, "version", lambda package: "0.40.1")
    code, text, _ = command("plan", "--format", "vllm", "--trace", trace, "--max-graphs", 4)
    line = next(line for line in text.splitlines() if line.startswith("syntax and picking"))
    assert code == 0 and "expected vllm 0.32.* or 0.33.*, got 0.40.1: check the result" in line


def test_a_number_of_graphs_below_the_kinds_of_steps_is_refused(command, trace):
    few = ["--format", "vllm-gaudi", "--trace", trace, "--max-graphs", 1]
    assert_refused(command("plan", *few), "expected --max-graphs of at least 2")
