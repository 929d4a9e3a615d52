"""Requests that cannot be served: a status, one clear sentence, and the server goes on."""

from __future__ import annotations

import json
import urllib.error
import urllib.request

import openai
import pytest

from tests.compiled_attn.serve.conftest import NAME, Running

SAID = [{"role": "user", "content": "hello"}]

SCHEMA_WITHOUT_ONE = {"type": "json_schema", "json_schema": {"name": 5}}
IMAGE = [{"type": "image_url", "image_url": "x"}]
TOOL = {"type": "function", "function": {"name": "look"}}

# Endpoint, fields, part of the message.
REFUSED = [
    ("text", {"prompt": "hello " * 20000}, "prompt of at most 65536"),
    ("text", {"prompt": "x" * 400}, "<= context 256"),
    ("text", {"prompt": ["x", "x" * 400]}, "<= context 256"),
    ("text", {"prompt": ""}, "expected prompt: a text, token ids, or a list of either, got ''"),
    ("text", {"prompt": ["x", [1]]}, "expected prompt: a text, token ids"),
    ("text", {"prompt": [[1], [9999]]}, "token ids in 0..271"),
    ("text", {"prompt": ["x", "<end>"]}, "special tokens only"),
    ("text", {"prompt": "x", "logprobs": 21}, "expected logprobs"),
    ("response", {"input": ""}, "expected input"),
    ("response", {"input": [5]}, "expected input: a text or a list of messages"),
    ("response", {"input": [{"type": "input_text"}]}, "expected input"),
    ("response", {"input": "x", "instructions": 5}, "expected instructions"),
    ("response", {"input": "x", "top_logprobs": 2}, "top_logprobs is not served, got 2: send 0"),
    ("response", {"input": "x", "text": {"verbosity": "low"}}, "and nothing else"),
    ("response", {"input": "x", "extra_body": {"n": 2}}, "got n"),
    ("response", {"input": "x", "tools": [{**TOOL, "name": "look"}]}, "tools are not served"),
    ("chat", {"messages": []}, "expected messages: a list of messages"),
    ("chat", {"messages": [{"role": "user"}]}, "a role and a content"),
    ("chat", {"messages": [{"role": "user", "content": IMAGE}]}, "content of text"),
    ("chat", {"messages": [{"role": "assistant", "tool_calls": 5}]}, "expected messages"),
    ("chat", {"messages": [{"role": "system", "content": "x"}, *SAID]}, "no system messages"),
]
REFUSED += [
    ("chat", {"messages": SAID, **fields}, message)
    for fields, message in [
        ({"tools": 5}, "expected tools"),
        ({"tools": [TOOL]}, "tools are not served: the chat template of tiny does not show them"),
        ({"tool_choice": "required"}, "tool_choice is not served, got 'required': send 'auto'"),
        ({"reasoning_effort": "low"}, "reasoning_effort is not served, got 'low': leave it out"),
        (
            {"extra_body": {"chat_template_kwargs": {"chat_template": "x"}}},
            "expected chat_template_kwargs: variables of the model's template",
        ),
        ({"extra_body": {"chat_template_kwargs": 5}}, "expected chat_template_kwargs"),
        ({"stream_options": {"include_usage": 1}}, "expected stream_options: an object"),
        ({"extra_body": {"moon": 1}}, "got moon"),
        ({"response_format": {"type": "xml"}}, "expected response_format: of type text, json_obj"),
        ({"response_format": SCHEMA_WITHOUT_ONE}, "json_schema with a schema in json_schema"),
        ({"n": 0}, "expected n: an integer in 1..128, got 0"),
        ({"top_logprobs": 2}, "expected logprobs: true with top_logprobs, got 2 without it"),
        ({"temperature": -1}, "expected temperature"),
        ({"max_tokens": 0}, "expected max_new_tokens"),
        ({"max_tokens": 9999}, "<= context 256"),
        ({"logit_bias": {"x": 1}}, "logit_bias: token ids"),
        ({"logit_bias": {"1": 1, "01": 2}}, "logit_bias: token"),
        ({"stop": 5}, "expected stop"),
        ({"stop": ["x"] * 17}, "expected stop: a text or a list of up to 16 texts"),
        ({"stop": "x" * 257}, "of up to 256 letters each, got 'xxx"),
        ({"extra_body": {"chat_template_kwargs": {"x": "x" * 70_000}}}, "prompt of at most 65536"),
        ({"extra_body": {"moon" * 1000: 1}}, "got moonmoon"),
    ]
]


def send(server: Running, kind: str, fields: dict):
    client = server.client
    calls = {
        "chat": client.chat.completions.create,
        "text": client.completions.create,
        "response": client.responses.create,
    }
    return calls[kind](model=NAME, **fields)


@pytest.mark.parametrize(("kind", "fields", "sentence"), REFUSED)
def test_a_bad_request_is_answered_with_a_sentence(server, kind, fields, sentence):
    with pytest.raises(openai.BadRequestError) as raised:
        send(server, kind, {**fields, "stream": True})
    assert sentence in raised.value.body["message"]
    assert raised.value.body["type"] == "invalid_request_error"
    assert "\n" not in raised.value.body["message"] and len(raised.value.body["message"]) < 500
    assert not server.model.llm.engine.open_requests


def test_another_model_is_not_found(server):
    with pytest.raises(openai.NotFoundError, match="expected the model 'tiny', got 'big'"):
        server.client.chat.completions.create(model="big", messages=SAID)
    with pytest.raises(openai.NotFoundError, match=r"got 'x{80}'\.\.\.: GET"):
        server.client.chat.completions.create(model="x" * 1_000_000, messages=SAID)


def test_a_route_that_there_is_not_is_not_found(server):
    status, text = server.get("/v1/nothing")
    assert status == 404
    assert json.loads(text)["error"]["type"] == "not_found_error"


def refusal(server: Running, body: bytes) -> str:
    """What a body as it is gets for an answer, which must be 400."""
    request = urllib.request.Request(
        f"{server.url}/v1/completions", body, {"Content-Type": "application/json"}
    )
    with pytest.raises(urllib.error.HTTPError) as raised:
        urllib.request.urlopen(request)
    assert raised.value.code == 400
    return json.loads(raised.value.read())["error"]["message"]


@pytest.mark.parametrize("body", [b"{no json", b"[]", b""])
def test_a_body_that_is_no_object_is_refused(server, body):
    assert "expected a JSON object" in refusal(server, body)


@pytest.mark.parametrize("levels", [100, 700, 20_000])
def test_a_body_of_very_many_levels_is_refused(server, levels):
    got = refusal(server, b'{"prompt": %b%b}' % (b"[" * levels, b"]" * levels))
    assert got and "\n" not in got


@pytest.mark.parametrize("body", [b'{"prompt": "a\\ud800"}', b'{"prompt": "a", "\\ud800": 1}'])
def test_half_a_surrogate_pair_is_refused(server, body):
    assert "expected valid Unicode" in refusal(server, body)


@pytest.mark.parametrize("stream", [b'"false"', b"1"])
def test_a_stream_is_true_or_false(server, stream):
    sentence = refusal(server, b'{"prompt": "a", "stream": %b}' % stream)
    assert sentence.startswith("expected stream: true or false, got ")


def test_after_all_of_them_the_server_answers(server):
    assert server.client.completions.create(model=NAME, prompt="x", max_tokens=2).choices
    assert server.get("/health") == (200, '{"status":"ready"}')
