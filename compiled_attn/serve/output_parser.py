"""Parses reasoning and tool calls out of a model's text, as its response template says.

Tokenizers bring a ``response_template``. The templates here are for families whose tokenizers do
not yet; they are those of transformers 5.24 (Apache-2.0).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

from tokenizers.decoders import DecodeStream
from transformers.utils.chat_parsing import ResponseParser

from compiled_attn.text import LLM

__all__ = ["OutputParser", "ParsedOutput", "Piece", "Reasoning", "ToolCall", "response_template"]

_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


def _template(start: str | list[str], **fields: Any) -> dict[str, Any]:
    return {"defaults": {"role": "assistant"}, "start_anchor": start, "fields": fields}


def _qwen(ends: str, **tool_calls: Any) -> dict[str, Any]:
    return _template(
        "<|im_start|>assistant\n",
        reasoning_content={"open": "<think>", "close": "</think>", "content": "text"},
        tool_calls={"repeats": True, **tool_calls},
        # `\s*` keeps newlines between two end markers from opening an empty region of content,
        # whose end would replace the real one. The same holds before <tool_call>.
        content={"close_pattern": rf"\s*(?:{ends})", "content": "text"},
    )


_QWEN = _qwen(
    r"<\|im_end\|>|<\|endoftext\|>|<\|eot_id\|>",
    open_pattern=r"\s*<tool_call>",
    close="</tool_call>",
    content="json",
    transform={"type": "function", "function": "{content}"},
)
_QWEN_3_5 = _qwen(
    r"<\|im_end\|>|<\|endoftext\|>",
    open_pattern=r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
    close_pattern=r"</function>\s*</tool_call>",
    content="xml-inline",
    content_args={"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
    transform={"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
)
_GEMMA_4 = _template(
    ["<|turn>model\n", "<tool_response|>"],
    reasoning_content={"open": "<|channel>thought\n", "close": "<channel|>", "content": "text"},
    tool_calls={
        "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
        "close": "<tool_call|>",
        "repeats": True,
        "content": "json",
        "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
    },
    content={"close": ["<turn|>", "<|tool_response>", "<eos>"], "content": "text"},
)
_QWEN_TYPES = (
    *("qwen2", "qwen2_moe", "qwen2_vl", "qwen2_5_vl", "qwen3", "qwen3_moe", "qwen3_next"),
    *("qwen3_vl", "qwen3_vl_moe"),
)
_QWEN_3_5_TYPES = "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"
_TEMPLATES = {
    **dict.fromkeys(_QWEN_TYPES, _QWEN),
    **dict.fromkeys(_QWEN_3_5_TYPES, _QWEN_3_5),
    "gemma4": _GEMMA_4,
}


class Reasoning(str):
    """A piece of reasoning, which is not part of the answer."""


class ToolCall(NamedTuple):
    """A call of a tool; ``arguments`` is JSON."""

    name: str
    arguments: str


Piece: TypeAlias = str | Reasoning | ToolCall


class ParsedOutput(NamedTuple):
    """A whole answer in its parts."""

    text: str
    reasoning: str | None = None
    tool_calls: Sequence[ToolCall] = ()


def response_template(llm: LLM) -> dict[str, Any] | None:
    """Returns the response template of a model; None: its text is not parsed."""
    template: dict[str, Any] | None = getattr(
        llm.tokenizer.of_transformers, "response_template", None
    )
    return _TEMPLATES.get(llm.model.config.model_type) if template is None else template


class OutputParser:
    """Parses the tokens of one answer, whole or as they come.

    Args:
        llm: the model.
        template: its response template.
        prompt: token ids, whose end may have opened a region, such as reasoning.
        tools: of the request, which give the types of arguments.
    """

    def __init__(
        self,
        llm: LLM,
        template: dict[str, Any],
        prompt: Sequence[int],
        tools: list[dict[str, Any]] | None,
    ) -> None:
        self._tokenizer = llm.tokenizer.of_transformers
        prefix, typed_tools = self._tokenizer.decode(prompt), cast("Any", tools)
        self._parser: Any = ResponseParser(template, prefix=prefix, tools=typed_tools)
        self._stream = DecodeStream([], skip_special_tokens=False)  # markers are special tokens
        self._tokens: list[int] = []
        self._decoded = 0

    def start(self) -> Iterator[Piece]:
        """Yields what the prompt began."""
        return _pieces(self._parser.initial_events)

    def put(self, token: int) -> Iterator[Piece]:
        """Yields what a token completes."""
        self._tokens.append(token)
        text = self._stream.step(self._tokenizer.backend_tokenizer, token) or ""
        self._decoded += len(text)
        return _pieces(self._parser.feed(text)) if text else iter(())

    def finish(self) -> Iterator[Piece]:
        """Yields the rest, after the last token."""
        if rest := self._tokenizer.decode(self._tokens)[self._decoded :]:
            yield from _pieces(self._parser.feed(rest))
        try:
            _, events = self._parser.finalize()
        except (ValueError, RuntimeError):  # the answer ended within a call
            return
        yield from _pieces(events)

    def parse(self, tokens: Sequence[int]) -> ParsedOutput:
        """Parses a whole answer."""
        self._parser.feed(self._tokenizer.decode(tokens))
        message, _ = self._parser.finalize()
        found = (message[name] for name in _REASONING_FIELDS if message.get(name) is not None)
        calls = [_tool_call(each) for each in message.get("tool_calls") or ()]
        return ParsedOutput(message.get("content", ""), next(found, None), calls)


def _pieces(events: Sequence[Mapping[str, Any]]) -> Iterator[Piece]:
    for event in events:
        name, text = event.get("field"), event.get("text")
        if event["type"] == "region_close" and name == "tool_calls":
            yield _tool_call(event["value"])
        elif event["type"] == "region_chunk" and text and not event.get("dirty"):
            if name in _REASONING_FIELDS:
                yield Reasoning(text)
            elif name == "content":
                yield text


def _tool_call(value: Mapping[str, Any]) -> ToolCall:
    name, arguments = value["function"]["name"], value["function"]["arguments"]
    return ToolCall(name, arguments if isinstance(arguments, str) else json.dumps(arguments))
