"""The fields of a request's body that transformers reads unchecked, and what they have to be."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from annotated_types import MinLen
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from transformers import PreTrainedTokenizerBase

from compiled_attn.serve.errors import RequestError
from graphs.errors import quoted

__all__ = ["check_fields"]


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


_Text = Annotated[str, MinLen(1)]
_Items = list[_Calling | _Message | _FunctionCall | _FunctionOutput]

_KINDS: dict[str, tuple[Any, str]] = {
    "messages": (
        Annotated[list[_Calling | _Message], MinLen(1)],
        "a list of messages, each of a role and a content of text",
    ),
    "prompt": (_Text, "a text"),
    "input": (
        _Text | Annotated[list[_Part], MinLen(1)] | Annotated[_Items, MinLen(1)],
        "a text or a list of messages",
    ),
    "instructions": (str, "a text"),
    "tools": (list[_Tool], "a list of functions"),
    "stream": (bool, "true or false"),
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
