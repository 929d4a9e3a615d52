"""Requests that cannot be served: a status, one clear sentence, and the server goes on."""

from __future__ import annotations

import json
import urllib.error
import urllib.request

import openai
import pytest

from tests.compiled_attn.serve.conftest import NAME, Running

SAID = [{"role": "user", "content": "hello"}]

REFUSED = {
    "a prompt without end": ("text", {"prompt": "hello " * 20000}, "prompt of at most 65536"),
    "more than is served": (
        "response",
        {"input": "x", "include": ["message.output_text.logprobs"]},
        "include is not served",
    ),
    "likely tokens of a response": (
        "response",
        {"input": "x", "top_logprobs": 2},
        "top_logprobs is not served, got 2: send 0, or leave it out",
    ),
    "a cut of what is too long": (
        "response",
        {"input": "x", "truncation": "auto"},
        "truncation is not served",
    ),
    "no messages": ("chat", {"messages": []}, "expected messages: a list of messages"),
    "a message without content": ("chat", {"messages": [{"role": "user"}]}, "a role and a content"),
    "an image": (
        "chat",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        "content of text",
    ),
    "a part without its type": (
        "chat",
        {"messages": [{"role": "user", "content": [{"text": "hi"}]}]},
        "content of text",
    ),
    "calls that are no list": (
        "chat",
        {"messages": [{"role": "assistant", "tool_calls": 5}]},
        "expected messages",
    ),
    "tools that are no list": ("chat", {"messages": SAID, "tools": 5}, "expected tools"),
    "what the template refuses": (
        "chat",
        {"messages": [{"role": "system", "content": "x"}, *SAID]},
        "no system messages",
    ),
    "a template of the client's": (
        "chat",
        {"messages": SAID, "extra_body": {"chat_template_kwargs": {"chat_template": "x"}}},
        "expected chat_template_kwargs: variables of the model's template",
    ),
    "a format there is not": (
        "chat",
        {"messages": SAID, "response_format": {"type": "xml"}},
        "expected response_format: of type text, json_object, or json_schema",
    ),
    "a schema that is none": (
        "chat",
        {"messages": SAID, "response_format": {"type": "json_schema", "json_schema": {"name": 5}}},
        "json_schema with a schema in json_schema",
    ),
    "a verbosity": ("response", {"input": "x", "text": {"verbosity": "low"}}, "and nothing else"),
    "no answers": ("chat", {"messages": SAID, "n": 0}, "expected n: an integer in 1..128, got 0"),
    "likely tokens alone": (
        "chat",
        {"messages": SAID, "top_logprobs": 2},
        "expected logprobs: true with top_logprobs, got 2 without it",
    ),
    "too many likely tokens": ("text", {"prompt": "x", "logprobs": 21}, "expected logprobs"),
    "several answers of a response": ("response", {"input": "x", "extra_body": {"n": 2}}, "got n"),
    "a tool that must be called": (
        "chat",
        {"messages": SAID, "tool_choice": "required"},
        "tool_choice is not served, got 'required': send 'auto'",
    ),
    "settings of transformers": (
        "chat",
        {"messages": SAID, "extra_body": {"generation_config": "{}"}},
        "generation_config is not served, got '{}': leave it out",
    ),
    "an unknown field": ("chat", {"messages": SAID, "extra_body": {"moon": 1}}, "got moon"),
    "a negative temperature": (
        "chat",
        {"messages": SAID, "temperature": -1},
        "expected temperature",
    ),
    "no tokens": ("chat", {"messages": SAID, "max_tokens": 0}, "expected max_new_tokens"),
    "a bias of no token": (
        "chat",
        {"messages": SAID, "logit_bias": {"x": 1}},
        "logit_bias: token ids",
    ),
    "a bias twice": (
        "chat",
        {"messages": SAID, "logit_bias": {"1": 1, "01": 2}},
        "logit_bias: token",
    ),
    "a bias without a number": ("chat", {"messages": SAID, "logit_bias": {"1": "x"}}, "logit_bias"),
    "a stop that is no text": ("chat", {"messages": SAID, "stop": 5}, "expected stop"),
    "more than the context": ("chat", {"messages": SAID, "max_tokens": 9999}, "<= context 256"),
    "a prompt beyond the context": ("text", {"prompt": "x" * 400}, "<= context 256"),
    "an empty prompt": ("text", {"prompt": ""}, "expected prompt: a text, token ids"),
    "no token ids": ("text", {"prompt": []}, "a text, token ids, or a list of either, got []"),
    "texts and token ids": ("text", {"prompt": ["x", [1]]}, "expected prompt: a text, token ids"),
    "an empty prompt of several": ("text", {"prompt": ["x", ""]}, "expected prompt: a text"),
    "a token that there is not": ("text", {"prompt": [[1], [9999]]}, "token ids in 0..271"),
    "a long prompt of several": ("text", {"prompt": ["x", "x" * 400]}, "<= context 256"),
    "an effort": (
        "chat",
        {"messages": SAID, "reasoning_effort": "low"},
        "reasoning_effort is not served, got 'low': leave it out",
    ),
    "tools that the template drops": (
        "chat",
        {"messages": SAID, "tools": [{"type": "function", "function": {"name": "look"}}]},
        "tools are not served: the chat template of tiny does not show them",
    ),
    "tools of a response that the template drops": (
        "response",
        {"input": "x", "tools": [{"type": "function", "name": "look", "parameters": {}}]},
        "tools are not served",
    ),
    "special tokens of several": ("text", {"prompt": ["x", "<end>"]}, "special tokens only"),
    "special tokens only": ("text", {"prompt": "<end><end>"}, "special tokens only"),
    "no input": ("response", {"input": ""}, "expected input"),
    "an input of numbers": (
        "response",
        {"input": [5]},
        "expected input: a text or a list of messages",
    ),
    "an input without text": ("response", {"input": [{"type": "input_text"}]}, "expected input"),
    "instructions of a number": (
        "response",
        {"input": "x", "instructions": 5},
        "expected instructions",
    ),
}


def send(server: Running, kind: str, fields: dict):
    client = server.client
    calls = {
        "chat": client.chat.completions.create,
        "text": client.completions.create,
        "response": client.responses.create,
    }
    return calls[kind](model=NAME, **fields)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_request_is_answered_with_a_sentence(server, name, stream):
    kind, fields, sentence = REFUSED[name]
    with pytest.raises(openai.BadRequestError) as raised:
        send(server, kind, {**fields, "stream": stream})
    assert sentence in raised.value.body["message"]
    assert raised.value.body["type"] == "invalid_request_error"
    assert "\n" not in raised.value.body["message"]
    assert not server.model.llm.engine.open_requests


def test_another_model_is_not_found(server):
    with pytest.raises(openai.NotFoundError, match="expected the model 'tiny', got 'big'"):
        server.client.chat.completions.create(model="big", messages=SAID)


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
