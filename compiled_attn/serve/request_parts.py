"""Objects inside requests of the OpenAI protocol: messages, tool calls, answer formats."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from annotated_types import MinLen
from pydantic import BaseModel, ConfigDict, Field, model_validator

from compiled_attn.engine import Grammar
from compiled_attn.serve.http_errors import RequestError

__all__ = [
    "ChatMessage",
    "FunctionCall",
    "FunctionOutput",
    "Many",
    "Object",
    "Part",
    "PlainFormat",
    "SchemaFormat",
    "StreamOptions",
    "Text",
    "TextSettings",
    "Tokens",
    "check_tool",
    "grammar_of",
    "messages_of",
]


class Object(BaseModel):
    """A JSON object whose known fields have strict types."""

    model_config = ConfigDict(strict=True, extra="allow")


# `fail_fast`: a list of 20,000 wrong items must not make 20,000 errors.
Many = Field(min_length=1, fail_fast=True)
Text = Annotated[str, MinLen(1)]
Tokens = Annotated[list[int], Many]


class Part(Object):
    """A piece of text in a message or an input."""

    type: Literal["text", "input_text", "output_text"]
    text: str


class _Function(Object):
    name: str
    arguments: str


class _ToolCall(Object):
    function: _Function


def check_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Raises ValueError unless a tool is a function."""
    if tool.get("type") != "function":
        raise ValueError("no function")
    return tool


class ChatMessage(Object):
    """A message of a chat."""

    role: str
    content: str | Annotated[list[Part], Field(fail_fast=True)] | None = None
    tool_calls: Annotated[list[_ToolCall], Field(fail_fast=True)] = []
    tool_call_id: Any = None

    @model_validator(mode="after")
    def _has_content(self) -> Self:
        if self.content is None and not self.tool_calls:
            raise ValueError("no content")
        return self

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates read it: text, and calls with parsed arguments."""
        content = self.content or ""
        text = content if isinstance(content, str) else " ".join(part.text for part in content)
        message: dict[str, Any] = {"role": self.role, "content": text}
        if self.tool_calls:  # then the content is empty, or the markup of the calls
            calls = [_parse_arguments(call.model_dump()) for call in self.tool_calls]
            message |= {"content": "", "tool_calls": calls}
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


def _parse_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}


class FunctionCall(Object):
    """A call that the model made in an earlier response."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class FunctionOutput(Object):
    """The result of a `FunctionCall`."""

    type: Literal["function_call_output"]
    call_id: str
    output: str


class PlainFormat(Object):
    """Any text, or any JSON object."""

    type: Literal["text", "json_object"]


class _Schema(Object):
    schema_: dict[str, Any] = Field(alias="schema")


class SchemaFormat(Object):
    """JSON of a schema, as chats nest it."""

    type: Literal["json_schema"]
    json_schema: _Schema


class _FlatSchemaFormat(_Schema):
    type: Literal["json_schema"]


class TextSettings(Object):
    """The field ``text`` of a response."""

    model_config = ConfigDict(extra="forbid")
    format: PlainFormat | _FlatSchemaFormat | None = None


class StreamOptions(Object):
    """Options of a stream."""

    include_usage: bool = False


def messages_of(items: Sequence[Any]) -> list[dict[str, Any]]:
    """Converts input items to chat messages; calls join the assistant's message before them."""
    messages: list[dict[str, Any]] = []
    for item in items:
        if isinstance(item, ChatMessage):
            messages.append(item.for_template())
        elif isinstance(item, FunctionOutput):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": item.output})
        else:
            function = {"name": item.name, "arguments": item.arguments}
            call = _parse_arguments({"id": item.call_id, "function": function})
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1]["content"] = ""
            messages[-1].setdefault("tool_calls", []).append(call)
    return messages


def grammar_of(given: Any) -> Grammar | None:
    """Returns the grammar of an answer format; None allows any text."""
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return Grammar.json_object()
    schema = given.json_schema if isinstance(given, SchemaFormat) else given
    try:
        return Grammar.json_schema(schema.schema_)
    except ValueError as error:
        raise RequestError(str(error)) from error
