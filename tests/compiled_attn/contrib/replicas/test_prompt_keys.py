"""Keys of prompts: equal as far as the texts are, and only within a tenant."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiled_attn.contrib.replicas.prompt_keys import prompt_keys


def shared(one: list[int], other: list[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
                min(len(one), len(other)))  # fmt: skip


@given(st.text("ab", max_size=400), st.text("ab", max_size=400))
def test_as_many_keys_are_shared_as_blocks_of_64_characters(one, other):
    texts = [json.dumps(each) for each in (one, other)]
    alike = next((at for at in range(min(map(len, texts))) if texts[0][at] != texts[1][at]),
                 min(map(len, texts)))  # fmt: skip
    keys = [prompt_keys(json.dumps({"prompt": each}).encode()) for each in (one, other)]
    assert [*map(len, keys)] == [len(text) // 64 for text in texts]
    assert shared(*keys) == alike // 64


def test_the_next_turn_of_a_chat_has_the_keys_of_the_turns_before():
    turns = [{"role": "user", "content": "x" * 300}]
    first = prompt_keys(json.dumps({"messages": turns, "seed": 1}).encode())
    turns += [{"role": "assistant", "content": "y" * 90}, {"role": "user", "content": "z"}]
    second = prompt_keys(json.dumps({"seed": 2, "messages": turns}).encode())
    assert shared(first, second) >= len(first) - 1 >= 3
    assert len(second) > len(first)


def test_tenants_share_no_keys():
    body = json.dumps({"prompt": "x" * 1000}).encode()
    assert not {*prompt_keys(body, b"one")} & {*prompt_keys(body, b"two")}


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"\xff", b"[" * 100_000, b'{"n": 1}'])
def test_what_has_no_prompt_has_no_keys(body):
    assert prompt_keys(body) == []
