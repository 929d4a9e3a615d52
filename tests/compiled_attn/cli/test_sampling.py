"""Sampling options of `run` and `chat`: what they come to, what is refused, answers of each."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from compiled_attn import LLM
from compiled_attn.engine import EngineConfig, SamplingParams
from tests.compiled_attn.cli.commands import Command, assert_refused

SMALL = ("--backend", "eager", "--max-tokens-per-step", 32, "--block-size", 8)


def run_prompt(command: Command, name: str, folder: Path, *more: object):
    return command(name, folder, *SMALL, "--prompt", "the moon", *more)


def test_a_stop_string_ends_the_answer(command, chat_dir):
    llm = LLM(chat_dir, EngineConfig(backend="eager", max_seqs=1, max_tokens_per_step=32))
    prompt = [{"role": "user", "content": "the moon"}]
    text = llm.generate([prompt], SamplingParams(max_new_tokens=12))[0].text
    stops = ("--stop", text[3:5], "--stop", "~~")
    shown = run_prompt(command, "chat", chat_dir, "--max-new-tokens", 12, *stops)
    assert shown.out == text[: text.index(text[3:5])] + "\n"
    text = llm.generate(["the moon"], SamplingParams(max_new_tokens=12))[0].text
    shown = run_prompt(command, "run", chat_dir, "--max-new-tokens", 12, "--stop", text[3:5])
    assert f"> the moon\n{text[: text.index(text[3:5])]}\n" in shown.out


@pytest.mark.parametrize("name", ["run", "chat"])
def test_an_answer_is_a_match_of_the_expression(command, chat_dir, name):
    pytest.importorskip("xgrammar", reason="needs the extra 'grammar'")
    shown = run_prompt(command, name, chat_dir, "--regex", "[ab]{3} moon", "--temperature", 1.5)
    assert shown.code == 0, shown.err
    assert re.search(r"^[ab]{3} moon$", shown.out, re.M)


def test_an_answer_is_of_the_schema_or_the_rules_in_a_file(command, chat_dir, tmp_path):
    pytest.importorskip("xgrammar", reason="needs the extra 'grammar'")
    file = tmp_path / "file"
    file.write_text(json.dumps({"enum": ["moon", "sun"]}))
    shown = run_prompt(command, "chat", chat_dir, "--json-schema", file)
    assert json.loads(shown.out) in ("moon", "sun")
    file.write_text('root ::= "x" root "y" | "xy"')
    shown = run_prompt(command, "chat", chat_dir, "--grammar", file, "--max-new-tokens", 60)
    assert re.match("x+y*$", shown.out.strip())


def test_bad_options_are_one_line(command, chat_dir, tmp_path, small):
    two = ("--regex", "a", "--grammar", tmp_path / "none")
    assert_refused(run_prompt(command, "chat", chat_dir, *two), "--regex and --grammar were given")
    missing = ("--json-schema", tmp_path / "none")
    assert_refused(run_prompt(command, "chat", chat_dir, *missing), "none: cannot be read")
    latin = tmp_path / "latin"
    latin.write_bytes(b"\xff")
    for name in ("run", "chat"):
        assert_refused(
            run_prompt(command, name, chat_dir, "--grammar", latin), "not UTF-8 at byte 1"
        )
    latin.write_text("{")
    assert_refused(
        run_prompt(command, "chat", chat_dir, "--json-schema", latin), "a JSON schema, got"
    )
    assert_refused(run_prompt(command, "chat", chat_dir, "--min-p", 2), "expected min_p")
    assert_refused(run_prompt(command, "run", chat_dir, "--min-p", 2), "expected min_p")
    assert_refused(command(*small, "--regex", "a"), "--regex is for answers of text")
    penalty = ("--check", 1, "--repetition-penalty", 1.2)
    assert_refused(run_prompt(command, "run", chat_dir, *penalty), "--check compares with plain")


def test_a_grammar_that_is_refused_is_one_line_before_the_model_loads(
    command, chat_dir, monkeypatch
):
    pytest.importorskip("xgrammar", reason="needs the extra 'grammar'")
    monkeypatch.setattr("compiled_attn.cli.chat.LLM", None)
    shown = run_prompt(command, "chat", chat_dir, "--regex", "(")
    assert_refused(shown, "expected a regular expression that xgrammar takes, got '('")
    assert_refused(
        run_prompt(command, "run", chat_dir, "--regex", "("), "parenthesis is not closed"
    )
