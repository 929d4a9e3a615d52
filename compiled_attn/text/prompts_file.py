"""Prompts of a user, read from a file of JSON lines."""

from __future__ import annotations

from pathlib import Path

from compiled_attn.errors import ConfigError
from compiled_attn.text.tokenizer import Prompt, check_messages
from graphs.errors import parse_json, quoted

__all__ = ["read_prompts"]


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a file with one JSON object a line; blank lines are skipped.

    Each object has a ``prompt``, which is a text, or ``messages``, which are a chat; other keys are
    not looked at.

    Raises:
        ConfigError: it cannot be read, has no prompt or a bad line, or is not UTF-8; names
            the line.
    """
    try:
        lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").splitlines()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    prompts = []
    for number, line in enumerate(lines, start=1):
        try:
            if line.strip():
                prompts.append(_prompt(line))
        except ValueError as error:
            raise ConfigError(f"{path}, line {number}: {error}") from error
    if not prompts:
        raise ConfigError(f'{path}: holds no prompt, expected lines such as {{"prompt": "Hello"}}')
    return prompts


def _prompt(line: bytes) -> Prompt:
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start + 1}: save it as UTF-8") from error
    row = parse_json(text)
    keys = {"prompt", "messages"} & row.keys() if isinstance(row, dict) else set()
    if len(keys) != 1:
        raise ValueError(
            f"expected a JSON object with a prompt or messages, got {quoted(row)}: such as "
            '{"prompt": "Hello"}'
        )
    if "messages" in keys:
        check_messages(row["messages"])
        return list(row["messages"])
    if not isinstance(prompt := row["prompt"], str):
        raise ValueError(f"expected a prompt of text, got {quoted(prompt)}")
    return prompt
