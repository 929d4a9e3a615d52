"""The command ``bundle``, and bad input of it and of ``serve --bundle``."""

from __future__ import annotations

import pytest

from tests.compiled_attn.cli.commands import assert_refused


def test_a_folder_that_exists_is_refused_before_the_warmup(command, chat_dir, tmp_path):
    assert_refused(command("bundle", chat_dir, "--out", tmp_path), f"got {tmp_path}", "new folder")


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [("--backend", "eager", "inductor"), ("--kernel", "portable", "auto or native"),
     ("--device", "meta", "cpu")],
)  # fmt: skip
def test_settings_that_no_bundle_has_are_refused_before_the_warmup(
    command, chat_dir, tmp_path, option, value, expected
):
    completed = command("bundle", chat_dir, "--out", tmp_path / "out", option, value)
    assert_refused(completed, f"{option} {expected} for a bundle, got {value}")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_made_is_refused_before_the_warmup(command, chat_dir, tmp_path):
    (tmp_path / "file").touch()
    assert_refused(command("bundle", chat_dir, "--out", tmp_path / "file/out"), f"{tmp_path}/file")


@pytest.mark.parametrize("options", [(), ("--or-compile",)])
def test_a_folder_that_is_no_bundle_is_refused_at_once(command, tmp_path, options):
    completed = command("serve", "--bundle", tmp_path, *options)
    assert_refused(completed, f"{tmp_path}", "none with manifest")


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
