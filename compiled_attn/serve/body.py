"""The body of a request: what is refused before it is read, and the sampling that it asks for.

The fields that transformers reads unchecked have their types here.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from annotated_types import MinLen
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from transformers import GenerationConfig, PreTrainedTokenizerBase

from compiled_attn.engine import Grammar, SamplingParams
from compiled_attn.serve.errors import RequestError
from graphs.errors import quoted

__all__ = [
    "EXTENSIONS",
    "Body",
    "check_body",
    "check_fields",
    "check_unicode",
    "count_characters",
    "grammar_of",
    "sampling_of",
    "without_nulls",
]

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
    "reasoning_effort": (),
    "reasoning": ({},),
    "verbosity": (),
    "tool_choice": ("auto",),
    "functions": (),
    "function_call": (),
    "generation_config": (),
    "previous_response_id": (),
    "background": (False,),
    "suffix": (),
    "include": ([],),
    "truncation": ("disabled",),
}
"""What would change the answer, and is served with these values only."""
_ONLY_OF: dict[str, dict[str, tuple[Any, ...]]] = {"input": {"top_logprobs": (0,)}}
"""The same where this field is needed."""


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class _Part(_Strict):
    type: Literal["text", "input_text", "output_text"]
    text: str


class _Function(_Strict):
    name: str
    arguments: str


class _Call(_Strict):
    function: _Function


class _Message(_Strict):
    role: str
    content: str | list[_Part]


class _Calling(_Strict):
    role: str
    tool_calls: Annotated[list[_Call], MinLen(1)]


class _FunctionCall(_Function):
    type: Literal["function_call"]
    call_id: str


class _FunctionOutput(_Strict):
    type: Literal["function_call_output"]
    call_id: str
    output: str


class _Tool(_Strict):
    type: Literal["function"]


class _Plain(_Strict):
    type: Literal["text", "json_object"]


class _Schema(_Strict):
    given: dict[str, Any] = Field(alias="schema")


class _OfSchema(_Strict):
    type: Literal["json_schema"]
    json_schema: _Schema


class _FlatSchema(_Schema):
    type: Literal["json_schema"]


class _TextSettings(_Strict):
    model_config = ConfigDict(extra="forbid")
    format: _Plain | _FlatSchema | None = None


class _StreamOptions(_Strict):
    include_usage: bool = False


_OF_TEMPLATES = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)


def _settings(given: dict[str, Any]) -> dict[str, Any]:
    if _OF_TEMPLATES & given.keys():
        raise ValueError("an argument of the tokenizer, such as another template")
    return given


_Many = Field(min_length=1, fail_fast=True)  # one error is told, whatever their number
_Text = Annotated[str, MinLen(1)]
_Tokens = Annotated[list[int], _Many]
_Items = list[_Calling | _Message | _FunctionCall | _FunctionOutput]

_KINDS: dict[str, tuple[Any, str]] = {
    "messages": (
        Annotated[list[_Calling | _Message], MinLen(1)],
        "a list of messages, each of a role and a content of text",
    ),
    "prompt": (
        _Text | _Tokens | Annotated[list[_Text], _Many] | Annotated[list[_Tokens], _Many],
        "a text, token ids, or a list of either",
    ),
    "echo": (bool, "true or false"),
    "input": (
        _Text | Annotated[list[_Part], MinLen(1)] | Annotated[_Items, MinLen(1)],
        "a text or a list of messages",
    ),
    "instructions": (str, "a text"),
    "tools": (list[_Tool], "a list of functions"),
    "stream": (bool, "true or false"),
    "parallel_tool_calls": (bool, "true or false"),
    "stream_options": (_StreamOptions, "an object whose include_usage is true or false"),
    "response_format": (
        _Plain | _OfSchema,
        "of type text, json_object, or json_schema with a schema in json_schema",
    ),
    "text": (
        _TextSettings,
        "a format of type text, json_object, or json_schema with a schema, and nothing else",
    ),
    "chat_template_kwargs": (
        Annotated[dict[str, Any], AfterValidator(_settings)],
        "variables of the model's template",
    ),
}
_CHECKS = {name: (TypeAdapter(kind), text) for name, (kind, text) in _KINDS.items()}


def check_fields(body: Mapping[str, Any], needed: str) -> None:
    """Looks at the fields that are there.

    Args:
        body: of a request.
        needed: the field that it cannot be without.

    Raises:
        RequestError: a field is of another kind, or the needed one is missing.
    """
    for name, (check, wanted) in _CHECKS.items():
        if name in body or name == needed:
            try:
                check.validate_python(body.get(name), strict=True)
            except ValidationError as error:
                raise RequestError(
                    f"expected {name}: {wanted}, got {quoted(body.get(name))}"
                ) from error


def check_unicode(body: Body) -> None:
    """Refuses half a surrogate pair, which only an escape in JSON can spell.

    Raises:
        RequestError: there is one.
    """
    try:
        for text in _strings(body):
            text.encode()
    except UnicodeEncodeError as error:
        raise RequestError("expected valid Unicode, got half a surrogate pair in it") from error


def count_characters(given: Any) -> int:
    """Characters of all strings in parsed JSON, keys too."""
    return sum(map(len, _strings(given)))


def _strings(given: Any) -> Iterator[str]:
    """In Python, and so without holding the GIL as `json.dumps` does."""
    left = [given]
    while left:
        each = left.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, dict):
            left.extend(each)
            left.extend(each.values())
        elif isinstance(each, list):
            left.extend(each)


def check_body(body: Body, needed: str) -> None:
    """Refuses what cannot be served before anything reads it.

    Args:
        body: of a request, without fields that are null.
        needed: the field that holds what is asked.

    Raises:
        RequestError: a field of another kind, or one that is not served.
    """
    check_fields(body, needed)
    for name, served in (_ONLY | _ONLY_OF.get(needed, {})).items():
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
    if body.get("echo"):
        wanted["prompt_logprobs"] = wanted["logprobs"]
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
