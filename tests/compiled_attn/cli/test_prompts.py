"""``compiled-attn run --prompts`` and ``--prompt``: text in, answers out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from compiled_attn import LLM
from compiled_attn.engine import EngineConfig, SamplingParams
from tests.compiled_attn.cli.commands import assert_refused

PROMPTS = ["the first", "Hello, 你好 🎉"]
CHAT = [{"role": "user", "content": "a question"}]


@pytest.fixture
def options(chat_dir: Path) -> list[object]:
    return [
        *("run", chat_dir, "--backend", "eager", "--max-new-tokens", 9),
        *("--max-tokens-per-step", 32, "--max-seqs", 4, "--block-size", 8, "--max-graphs", 4),
    ]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = [*({"prompt": text} for text in PROMPTS), {"messages": CHAT, "id": 3}]
    path.write_text("\n\n".join(map(json.dumps, rows)))
    return path


def test_the_prompts_of_a_file_are_answered_in_their_order(
    command, options, file, chat_dir, tmp_path
):
    config = EngineConfig(backend="eager", max_seqs=4, max_tokens_per_step=32, max_graphs=4)
    sampling = SamplingParams(max_new_tokens=9)
    expected = [each.text for each in LLM(chat_dir, config).generate([*PROMPTS, CHAT], sampling)]
    completed = command(*options, "--prompts", file, "--check", 3, "--json", tmp_path / "out.json")
    assert completed.code == 0, completed.err
    prompts = [*PROMPTS, "a question"]
    shown = "".join(f"> {a}\n{b}\n\n" for a, b in zip(prompts, expected, strict=True))
    assert completed.out.startswith(shown)
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["answers"] == expected
    assert (result["checked_requests"], result["mismatched_tokens"]) == (3, 0)


def test_one_prompt_is_answered(command, options):
    completed = command(*options, "--prompt", "the first")
    assert completed.code == 0 and completed.out.startswith("> the first\n")


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (b"\n\n", ["holds no prompt", '{"prompt": "Hello"}']),
        (b'{"prompt": "a"}\n\n{"prompt": "\xff"}\n', ["line 3: not UTF-8 at byte 13"]),
        (b'{"prompt": "a"}\n{"prompt": \n', ["line 2: not valid JSON"]),
        (b'{"text": "a"}', ["line 1: expected a JSON object with a prompt or messages"]),
        (b'{"prompt": "a", "messages": []}', ["line 1: expected a JSON object with a prompt or"]),
        (b"[1]", ["line 1: expected a JSON object", "got [1]"]),
        (b'{"prompt": 7}', ["line 1: expected a prompt of text, got 7"]),
        (b'{"messages": "Hello"}', ["line 1: expected messages", "got 'Hello'"]),
        (b'{"prompt": ""}', ["expected a prompt with text, got an empty one"]),
        (b'{"prompt": "<end><user>"}', ["got only special tokens, '<end><user>'"]),
        (b'{"messages": [{"role": "system", "content": "x"}]}', ["no system messages"]),
    ],
)
def test_a_bad_file_is_refused_with_the_line(command, options, file, content, parts):
    file.write_bytes(content)
    assert_refused(command(*options, "--prompts", file), *parts)


def test_what_does_not_go_together_or_does_not_fit_is_refused(command, options, file, model_dir):
    assert_refused(command(*options, "--prompts", file, "--prompt", "a"), "--prompts and --prompt")
    assert_refused(command(*options, "--prompt", "a", "--speed", 1), "--prompt and --speed")
    assert_refused(command(*options, "--prompt", "x" * 300), "context 256, got 300 + 9")
    assert_refused(command(*options, "--prompts", file.parent / "none"), "none: cannot be read")
    assert_refused(command("run", "--prompt", "a"), "needs a model that has a tokenizer")
    options[1] = model_dir
    assert_refused(command(*options, "--prompt", "a"), "has no tokenizer")
