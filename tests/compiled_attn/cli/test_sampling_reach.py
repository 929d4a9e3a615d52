"""Every field of `SamplingParams` can be said to the server and to the commands, or is left out."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extra serve")
from transformers import GenerationConfig

from compiled_attn.cli import inputs as command
from compiled_attn.cli.options import RunOptions
from compiled_attn.engine import Grammar, SamplingParams
from compiled_attn.serve.http_errors import RequestError
from compiled_attn.serve.requests import ChatRequest, CompletionRequest

DEFAULTS = SamplingParams()
FIELDS = {each.name for each in fields(SamplingParams)}
VALUES: dict[str, Any] = {
    "max_new_tokens": 7,
    "temperature": 0.5,
    "top_k": 3,
    "top_p": 0.9,
    "seed": 5,
    "stop_token_ids": (3,),
    "ignore_eos": True,
    "stop": ("end",),
    "min_p": 0.1,
    "repetition_penalty": 1.5,
    "presence_penalty": 0.25,
    "frequency_penalty": -0.25,
    "logit_bias": ((5, 2.0),),
    "min_tokens": 2,
    "logprobs": 2,
    "prompt_logprobs": 2,
    "n": 2,
    "grammar": Grammar.json_object(),
    "adapter": "sql",
}
BODIES: dict[str, dict[str, Any]] = {
    "max_new_tokens": {"max_completion_tokens": 7},
    "stop": {"stop": "end"},
    "logit_bias": {"logit_bias": {"5": 2.0}},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "prompt_logprobs": {"logprobs": 2, "echo": True},
    "grammar": {"response_format": {"type": "json_object"}},
}
"""Fields that the protocol has under another name or in another form; others have their own."""
OPTIONS: dict[str, dict[str, Any]] = {"stop": {"stop": ["end"]}, "grammar": {"regex": "a|b"}}
"""The same of the options of a command."""

_IDS = "who writes text knows no ids of tokens"
NOT_OF_THE_SERVER = {
    "stop_token_ids": f"{_IDS}: `stop` takes texts",
    "adapter": "it is the model of a request",
}
NOT_OF_A_COMMAND = {
    "stop_token_ids": f"{_IDS}: --stop takes texts",
    "logit_bias": _IDS,
    "ignore_eos": "an answer that is read ends where the model ends it",
    "min_tokens": "an answer that is read ends where the model ends it",
    "logprobs": "a command prints text",
    "prompt_logprobs": "a command prints text",
    "n": "a command prints one answer to a prompt",
    "adapter": "only `serve` has adapters",
}


def requested(body: dict[str, Any]) -> SamplingParams:
    """The sampling of a chat, or of a completion where it has an echo."""
    if "echo" in body:
        return CompletionRequest.parse({"prompt": "x", **body}).sampling(GenerationConfig())
    messages = [{"role": "user", "content": "x"}]
    return ChatRequest.parse({"messages": messages, **body}).sampling(GenerationConfig())


def test_each_field_has_a_value_that_is_not_its_default():
    assert VALUES.keys() == FIELDS
    assert all(getattr(SamplingParams(**{name: x}), name) != getattr(DEFAULTS, name)
               for name, x in VALUES.items())  # fmt: skip


@pytest.mark.parametrize("name", sorted(FIELDS - NOT_OF_THE_SERVER.keys()))
def test_a_field_reaches_the_protocol_of_the_server(name):
    sampling = requested(BODIES.get(name, {name: VALUES[name]}))
    assert getattr(sampling, name) == VALUES[name]


@pytest.mark.parametrize("name", sorted(FIELDS - NOT_OF_A_COMMAND.keys()))
def test_a_field_reaches_the_options_of_a_command(name):
    options = RunOptions(**OPTIONS.get(name, {name: VALUES[name]}))
    expected = Grammar.regex("a|b") if name == "grammar" else VALUES[name]
    assert getattr(command.sampling_of(options), name) == expected


def test_what_is_left_out_is_not_there():
    options = {each.name for each in fields(RunOptions)}
    assert not options & NOT_OF_A_COMMAND.keys()
    for name in NOT_OF_THE_SERVER:
        with pytest.raises(RequestError, match=f"expected fields of the protocol, got {name}"):
            requested({name: VALUES[name]})
