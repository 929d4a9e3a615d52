"""Turns the tokens of generations into server-sent events, each serialised once."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Protocol

from compiled_attn.engine import GenerationResult, RequestHandle, TokenEvent
from compiled_attn.serve.http_errors import error_content
from compiled_attn.serve.output_parser import OutputParser, Piece, Reasoning, ToolCall
from compiled_attn.serve.token_logprobs import OffsetCounter, ScoredToken
from compiled_attn.text import AnswerPieces, Tokenizer

__all__ = [
    "EventWriter",
    "ParsedEvents",
    "TextEvents",
    "error_event",
    "merge_streams",
    "stream_answer",
    "to_json",
]

to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class EventWriter(Protocol):
    """Writes the events of one answer in the format of an endpoint."""

    def start(self) -> str:
        """The events before the answer."""

    def finish(self, result: GenerationResult) -> str:
        """The events after it."""

    def text(self, text: str, scores: Sequence[ScoredToken] = ()) -> str:
        """A piece of text, with the log-probabilities of its tokens."""

    def reasoning(self, text: str) -> str:
        """A piece of reasoning."""

    def tool_call(self, call: ToolCall) -> str:
        """A whole call."""


class TextEvents:
    """Turns the tokens of an answer that is plain text into events; ``""`` is none.

    Args:
        writer: writes them.
        pieces: decodes the tokens.
        end_tokens: tokens that are not part of the text.
        tokenizer: of the model.
    """

    def __init__(
        self,
        writer: EventWriter,
        pieces: AnswerPieces,
        end_tokens: frozenset[int],
        tokenizer: Tokenizer,
    ) -> None:
        self._writer, self._pieces, self._end_tokens = writer, pieces, end_tokens
        self._offsets = OffsetCounter(tokenizer)
        self._scores: list[ScoredToken] = []

    def start(self) -> str:
        """Returns the events before the first token."""
        return ""

    def put(self, event: TokenEvent) -> str:
        """Returns the events of a token."""
        token, scores = event.token, event.logprobs
        assert token is not None
        if scores is not None and token not in self._end_tokens:
            self._scores.append(self._offsets.add(token, scores))
        text = self._pieces.put(token)
        return self._write(text) if text else ""

    def finish(self) -> str:
        """Returns the events after the last token."""
        text = self._pieces.rest()
        return self._write(text) if text or self._scores else ""

    def _write(self, text: str) -> str:
        scores, self._scores = self._scores, []
        return self._writer.text(text, scores)


class ParsedEvents(TextEvents):
    """Events of an answer with reasoning and tool calls."""

    def __init__(self, writer: EventWriter, parser: OutputParser) -> None:
        self._writer, self._parser = writer, parser

    def start(self) -> str:
        """Returns the events of what the prompt began."""
        return self._write_all(self._parser.start())

    def put(self, event: TokenEvent) -> str:
        """Returns the events of a token."""
        assert event.token is not None
        return self._write_all(self._parser.put(event.token))

    def finish(self) -> str:
        """Returns the events after the last token."""
        return self._write_all(self._parser.finish())

    def _write_all(self, pieces: Iterable[Piece]) -> str:
        return "".join(map(self._event, pieces))

    def _event(self, piece: Piece) -> str:
        if isinstance(piece, ToolCall):
            return self._writer.tool_call(piece)
        is_reasoning = isinstance(piece, Reasoning)
        return self._writer.reasoning(piece) if is_reasoning else self._writer.text(piece)


async def stream_answer(
    handle: RequestHandle,
    events: TextEvents,
    writer: EventWriter,
    observe_gap: Callable[[float], None],
) -> AsyncIterator[str]:
    """Yields the events of an answer as its tokens come.

    Args:
        handle: the generation, which is cancelled if the reader stops.
        events: makes the events of its tokens.
        writer: writes those before and after.
        observe_gap: called with the seconds between two tokens.

    Raises:
        RuntimeError: the generation failed.
    """
    if start := writer.start() + events.start():
        yield start
    last_s = 0.0
    async for event in handle:
        now_s = time.perf_counter()
        if last_s:
            observe_gap(now_s - last_s)
        last_s = now_s
        result = event.result
        if result is not None and result.error:
            raise RuntimeError(result.error)
        text = events.put(event)
        if result is not None:
            text += events.finish() + writer.finish(result)
        if text:
            yield text


async def merge_streams(streams: Sequence[AsyncIterator[str]]) -> AsyncIterator[str]:
    """Yields the events of streams as they come; the first that raises ends all.

    Events that came while the reader was busy are joined: sending costs more than all else.
    """
    queue: asyncio.Queue[str | Exception | None] = asyncio.Queue()

    async def read(stream: AsyncIterator[str]) -> None:
        try:
            async for event in stream:
                queue.put_nowait(event)
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.ensure_future(read(stream)) for stream in streams]
    try:
        left = len(tasks)
        while left:
            batch = [await queue.get()]
            while not queue.empty():
                batch.append(queue.get_nowait())
            if events := "".join([each for each in batch if isinstance(each, str)]):
                yield events
            for each in batch:
                if isinstance(each, Exception):
                    raise each
            left -= batch.count(None)
    finally:
        for task in tasks:
            task.cancel()


def error_event(error: Exception) -> str:
    """The event of an error, which ends a stream."""
    return f"data: {to_json(error_content(500, str(error)))}\n\n"
