"""The body of a request: what is refused before it is read, and the sampling that it asks for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from transformers import GenerationConfig

from compiled_attn.engine import Grammar, SamplingParams
from compiled_attn.serve.errors import RequestError
from compiled_attn.serve.fields import check_fields
from graphs.errors import quoted

__all__ = ["EXTENSIONS", "Body", "check_body", "grammar_of", "sampling_of", "without_nulls"]

Body = Mapping[str, Any]

EXTENSIONS = frozenset(
    {"top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "response_format"}
)
"""Fields beyond the protocol, as vLLM names them: ``extra_body`` of the client."""

_ENOUGH_TOKENS = 1024
"""Of a request that does not say how many it wants."""

_MOST_CHOICES, _MOST_LIKELY = 128, 20  # as OpenAI has it
_SAME = (
    *(EXTENSIONS - {"response_format"}),
    *("temperature", "top_p", "seed", "presence_penalty", "frequency_penalty"),
)
_WITH_SCHEMAS = ("tools", "response_format", "text")
_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
_ONLY: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "tool_choice": ("auto",),
    "functions": (),
    "function_call": (),
    "generation_config": (),
    "previous_response_id": (),
    "background": (False,),
    "suffix": (),
}
"""What would change the answer, and is served with these values only."""


def check_body(body: Body, needed: str) -> None:
    """Refuses what cannot be served before anything reads it.

    Args:
        body: of a request, without fields that are null.
        needed: the field that holds what is asked.

    Raises:
        RequestError: a field of another kind, one that is not served, or text that is no Unicode.
    """
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise RequestError("expected valid Unicode, got half a surrogate pair in it") from error
    check_fields(body, needed)
    for name, served in _ONLY.items():
        if name in body and body[name] not in served:
            values = " or ".join(map(repr, served))
            instead = f"send {values}, or leave it out" if values else "leave it out"
            raise RequestError(f"{name} is not served, got {quoted(body[name])}: {instead}")


def without_nulls(body: Body) -> dict[str, Any]:
    """The same without fields that are null, which the protocol takes for left out.

    Schemas are left as they are.
    """
    return {
        name: each if name in _WITH_SCHEMAS else _without_nulls(each)
        for name, each in body.items()
        if each is not None
    }


def _without_nulls(given: Any) -> Any:
    if isinstance(given, dict):
        return {name: _without_nulls(each) for name, each in given.items() if each is not None}
    return [*map(_without_nulls, given)] if isinstance(given, list) else given


def grammar_of(body: Body) -> Grammar | None:
    """What the format that a request asks for makes of its text; None: it may be any.

    Raises:
        RequestError: a schema that is none.
    """
    given: Any = body.get("response_format") or body.get("text", {}).get("format")
    if given is None or given["type"] == "text":
        return None
    if given["type"] == "json_object":
        return Grammar.json_object()
    try:
        return Grammar.json_schema(given.get("json_schema", given)["schema"])
    except ValueError as error:
        raise RequestError(str(error)) from error


def sampling_of(body: Body, default: GenerationConfig) -> tuple[SamplingParams, bool]:
    """The sampling of a request, and whether it says how many tokens it wants.

    Args:
        body: of the request.
        default: what the model's makers advise where the request says nothing.

    Raises:
        RequestError: a value that `SamplingParams` refuses.
    """
    advised = {"temperature": 1.0, "top_p": default.top_p, "top_k": default.top_k}
    advised["temperature"] = default.temperature or 1.0
    wanted = {name: x for name, x in advised.items() if x is not None and default.do_sample}
    wanted |= {name: body[name] for name in _SAME if name in body}
    if body.get("stop"):
        stop = body["stop"]
        wanted["stop"] = (stop,) if isinstance(stop, str) else stop
    if body.get("logit_bias"):
        wanted["logit_bias"] = _bias(body["logit_bias"])
    limit = next((body[name] for name in _LIMITS if name in body), None)
    wanted["grammar"] = grammar_of(body)
    wanted["n"] = _count(body, "n", 1, _MOST_CHOICES)
    wanted["logprobs"] = _logprobs(body)
    wanted["max_new_tokens"] = _ENOUGH_TOKENS if limit is None else limit
    try:
        return SamplingParams(**wanted), limit is not None
    except (TypeError, ValueError) as error:
        raise RequestError(str(error)) from error


def _logprobs(body: Body) -> int | None:
    """How many of the most likely tokens are told with each; None: no log-probabilities are.

    Chats say whether, and how many beside it; texts say how many.
    """
    most = _count(body, "top_logprobs", 0, _MOST_LIKELY)
    whether = body.get("logprobs", False)
    if whether is not False and whether is not True:
        return _count(body, "logprobs", 0, _MOST_LIKELY)
    if most and not whether:
        raise RequestError(f"expected logprobs: true with top_logprobs, got {most} without it")
    return most if whether else None


def _count(body: Body, name: str, default: int, most: int) -> int:
    given = body.get(name, default)
    if not isinstance(given, int) or isinstance(given, bool) or not default <= given <= most:
        raise RequestError(
            f"expected {name}: an integer in {default}..{most}, got {quoted(given)}: choose one"
        )
    return given


def _bias(given: Any) -> dict[int, float]:
    try:
        biases = {int(token): bias for token, bias in given.items()}
        if [*map(str, biases)] == [*given]:
            return biases
    except (AttributeError, TypeError, ValueError):
        pass
    raise RequestError(f"expected logit_bias: token ids with numbers, got {quoted(given)}")
