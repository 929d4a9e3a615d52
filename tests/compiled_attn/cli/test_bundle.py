"""The command ``bundle``, and bad input of it and of ``serve --bundle``."""

from __future__ import annotations

import pytest

from tests.compiled_attn.cli.commands import assert_refused


def test_a_folder_that_exists_is_refused_before_the_warmup(command, chat_dir, tmp_path):
    assert_refused(command("bundle", chat_dir, "--out", tmp_path), f"got {tmp_path}", "new folder")


def test_an_engine_whose_graphs_are_not_replayed_is_refused(command, chat_dir, tmp_path):
    sizes = ("--max-seqs", 2, "--max-tokens-per-step", 8, "--block-size", 8)
    out = tmp_path / "bundle"
    completed = command("bundle", chat_dir, "--out", out, "--backend", "eager", *sizes)
    assert_refused(completed, "backend inductor on the CPU, got eager", at_once=False)
    assert [*tmp_path.iterdir()] == []


def test_a_folder_that_is_no_bundle_is_refused(command, tmp_path):
    assert_refused(command("serve", "--bundle", tmp_path), f"{tmp_path}", "none with manifest")


def test_options_of_model_and_engine_are_refused_by_name(command, chat_dir, tmp_path):
    options = ("--dtype", "bfloat16", "--no-strict", "--max-seqs", 2, "--speculate", "ngram:4")
    assert_refused(
        command("serve", chat_dir, "--bundle", tmp_path, *options, "--threads", 1),
        "expected no MODEL, --dtype, --no-strict, --max-seqs, --threads, --speculate with --bundle",
    )


@pytest.mark.parametrize(
    ("options", "word"),
    [(("--or-compile",), "--bundle"), (("--bundle", "x", "--replicas", 2), "one process")],
)
def test_options_that_contradict_each_other_are_refused(command, chat_dir, options, word):
    assert_refused(command("serve", chat_dir, *options), word)
