"""Structured output over HTTP, as the official client sends and reads it."""

from __future__ import annotations

import json
import sys

import openai
import pytest

from compiled_attn.engine import Grammar, SamplingParams
from compiled_attn.text import LLM
from tests.compiled_attn.serve.conftest import NAME

pytest.importorskip("xgrammar", reason="needs the extra 'grammar'")

CHAT = [{"role": "user", "content": "What is on the moon?"}]
SCHEMA = {
    "type": "object",
    "properties": {"on": {"enum": ["moon", None]}, "count": {"type": "integer", "maximum": 99}},
    "required": ["on", "count"],
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "found", "schema": SCHEMA}}


def fits(text: str) -> bool:
    value = json.loads(text)
    return [*value] == ["on", "count"] and value["on"] in ("moon", None) and value["count"] <= 99


def unlikely(llm: LLM) -> dict[int, float]:
    """What makes blanks between elements, and long texts, unlikely."""
    ids = {each for sign in ("\n", "\r", " ", "\n\n") for each in llm.tokenizer.encode(sign)}
    return {each: -100.0 for each in ids}


def alone_text(alone: LLM, prompt: object, **more: object) -> str:
    grammar = Grammar.json_schema(SCHEMA)
    params = SamplingParams(max_new_tokens=60, grammar=grammar, **more)
    return alone.generate([prompt], params)[0].text


def test_a_chat_answers_in_json_of_the_schema_whole_and_as_a_stream(server, alone):
    bias = unlikely(alone)
    settings = {"model": NAME, "messages": CHAT, "max_tokens": 60, "response_format": FORMAT}
    settings["logit_bias"] = bias
    whole = server.client.chat.completions.create(**settings).choices[0]
    assert whole.message.content == alone_text(alone, CHAT, logit_bias=bias)
    assert whole.finish_reason == "stop"
    assert fits(whole.message.content)
    chunks = [*server.client.chat.completions.create(**settings, stream=True)]
    assert "".join(each.choices[0].delta.content or "" for each in chunks) == whole.message.content
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_any_object_and_any_text_can_be_asked_for(server, alone):
    settings = {"model": NAME, "messages": CHAT, "max_tokens": 4}
    create = server.client.chat.completions.create
    given = create(**settings, response_format={"type": "json_object"}).choices[0].message.content
    assert given.startswith("{")
    plain = create(**settings, response_format={"type": "text"}).choices[0].message.content
    assert plain == alone.generate([CHAT], SamplingParams(max_new_tokens=4))[0].text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("schema", [{"type": "moon"}, {"enum": []}, {"$ref": "#/nope"}])
def test_a_schema_that_is_refused_is_a_bad_request(server, schema, stream):
    given = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with pytest.raises(openai.BadRequestError) as raised:
        server.client.chat.completions.create(
            model=NAME, messages=CHAT, response_format=given, stream=stream
        )
    message = raised.value.body["message"]
    assert message.startswith("expected a JSON schema that xgrammar takes, got ")
    assert "\n" not in message and not server.model.llm.engine.open_requests


def test_without_xgrammar_a_format_is_refused_with_the_remedy(server, monkeypatch):
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    for name in ("_compilers", "_cache", "_in_use"):
        monkeypatch.setattr(server.model.llm.grammars, name, {})
    with pytest.raises(openai.BadRequestError, match=r"\[grammar\]"):
        server.client.chat.completions.create(
            model=NAME, messages=CHAT, response_format={"type": "json_object"}
        )
