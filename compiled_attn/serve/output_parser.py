"""Parses reasoning and tool calls out of a model's text, as its response template says.

Tokenizers bring a ``response_template``. The templates here are for families whose tokenizers do
not yet; they are those of transformers 5.24 (Apache-2.0).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias, cast

from compiled_attn.text import LLM, TextPieces

__all__ = ["OutputParser", "ParsedOutput", "Piece", "Reasoning", "ToolCall", "response_template"]

_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
_BETWEEN_MARKERS = re.compile("(?=<)|(?<=>)")  # a malformed call loses what is fed with its end


def _with_blanks(pattern: str) -> str:
    # A run of blanks is tried once, from its start: `\s*` tries each of them, which takes quadratic
    # time, and clients choose what a model writes.
    return rf"(?:(?<!\s)\s++{pattern}|{pattern})"


_VALUE = r"\s*+(?P<value>(?:(?!</parameter>)\S|\s++(?!</parameter>))*+)\s*"


def _template(start: str | list[str], **fields: Any) -> dict[str, Any]:
    return {"defaults": {"role": "assistant"}, "start_anchor": start, "fields": fields}


def _qwen(ends: str, **tool_calls: Any) -> dict[str, Any]:
    return _template(
        "<|im_start|>assistant\n",
        reasoning_content={"open": "<think>", "close": "</think>", "content": "text"},
        tool_calls={"repeats": True, **tool_calls},
        # Blanks keep newlines between two end markers from opening an empty region of content,
        # whose end would replace the real one. The same holds before <tool_call>.
        content={"close_pattern": _with_blanks(f"(?:{ends})"), "content": "text"},
    )


_QWEN = _qwen(
    r"<\|im_end\|>|<\|endoftext\|>|<\|eot_id\|>",
    open_pattern=_with_blanks("<tool_call>"),
    close="</tool_call>",
    content="json",
    transform={"type": "function", "function": "{content}"},
)
_QWEN_3_5 = _qwen(
    r"<\|im_end\|>|<\|endoftext\|>",
    open_pattern=_with_blanks(r"<tool_call>\s*<function=(?P<name>[^>\n]+)>"),
    close_pattern=r"</function>\s*</tool_call>",
    content="xml-inline",
    content_args={"tag_pattern": rf"<parameter=(?P<key>[^>\n]+)>{_VALUE}</parameter>"},
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

    The end of the prompt may have opened a region, such as reasoning. Tools type their arguments.
    """

    def __init__(
        self,
        llm: LLM,
        template: dict[str, Any],
        prompt: Sequence[int],
        tools: list[dict[str, Any]] | None,
    ) -> None:
        self._decode = partial(llm.tokenizer.decode, special=True)  # markers are special tokens
        self._template, self._tools = template, tools
        self._parser = self._new_parser(self._decode(prompt))
        self._call = ""  # text of the open tool call
        self._text = TextPieces(llm.tokenizer, special=True)

    def start(self) -> list[Piece]:
        """Returns what the prompt began."""
        return self._pieces(lambda: self._parser.initial_events)

    def put(self, token: int) -> list[Piece]:
        """Returns what a token completes."""
        return self._feed(text) if (text := self._text.put(token)) else []

    def finish(self) -> list[Piece]:
        """Returns the rest, after the last token."""
        return [*self._feed(self._text.rest()), *self._pieces(lambda: self._parser.finalize()[1])]

    def parse(self, tokens: Sequence[int]) -> ParsedOutput:
        """Parses a whole answer."""
        pieces = self.start()
        for text in _BETWEEN_MARKERS.split(self._decode(tokens)):
            pieces += self._feed(text)
        pieces += self.finish()
        text = "".join([each for each in pieces if type(each) is str]).strip()
        reasoning = "".join([each for each in pieces if isinstance(each, Reasoning)]).strip()
        calls = [each for each in pieces if isinstance(each, ToolCall)]
        return ParsedOutput(text, reasoning or None, calls)

    def _new_parser(self, prefix: str) -> Any:
        from transformers.utils.chat_parsing import ResponseParser  # takes seconds

        return ResponseParser(self._template, prefix=prefix, tools=cast("Any", self._tools))

    def _feed(self, text: str) -> list[Piece]:
        return self._pieces(lambda: self._parser.feed(text))

    def _pieces(self, parse: Callable[[], Sequence[Mapping[str, Any]]]) -> list[Piece]:
        """Returns the pieces of the next events; a malformed tool call becomes plain text."""
        try:
            events = parse()
        except Exception:  # whatever the model wrote in place of a call
            self._parser = self._new_parser("")
            return self._malformed_call()
        pieces: list[Piece] = []
        for event in events:
            kind, name, text = event["type"], event.get("field"), event.get("text") or ""
            if kind == "region_open":
                self._call = ""
            elif name == "tool_calls":
                self._call += text
                if kind == "region_close":
                    try:
                        pieces.append(_tool_call(event["value"]))
                    except (KeyError, TypeError, ValueError, RecursionError):
                        pieces += self._malformed_call()
            elif text and not event.get("dirty"):
                if name in _REASONING_FIELDS:
                    pieces.append(Reasoning(text))
                elif name == "content":
                    pieces.append(text)
        return pieces

    def _malformed_call(self) -> list[Piece]:
        text, self._call = self._call, ""
        return [text] if text else []


def _tool_call(value: Mapping[str, Any]) -> ToolCall:
    name, arguments = value["function"]["name"], value["function"]["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, allow_nan=False)
    call = ToolCall(name, arguments)
    "".join(call).encode()  # half a surrogate pair cannot be sent
    return call
