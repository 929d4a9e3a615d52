"""Turns the tokens of generations into server-sent events, each serialised once."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Protocol

from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from compiled_attn.engine import GenerationResult, TokenEvent
from compiled_attn.serve.context import RequestContext
from compiled_attn.serve.output_parser import OutputParser, Piece, Reasoning, ToolCall
from compiled_attn.serve.token_logprobs import OffsetCounter, ScoredToken
from compiled_attn.text import AnswerPieces, Tokenizer

__all__ = [
    "EventStream",
    "EventWriter",
    "ParsedEvents",
    "TextEvents",
    "merge_streams",
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
    """Turns the tokens of an answer that is plain text into events; ``""`` is none."""

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

    def put(self, events: Sequence[TokenEvent]) -> str:
        """Returns the events of tokens."""
        for event in events:
            if event.logprobs is not None and event.token not in self._end_tokens:
                self._scores.append(self._offsets.add(_token(event), event.logprobs))
        text = self._pieces.put(*map(_token, events))
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

    def put(self, events: Sequence[TokenEvent]) -> str:
        """Returns the events of tokens."""
        return "".join([self._write_all(self._parser.put(_token(event))) for event in events])

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


def _token(event: TokenEvent) -> int:
    assert event.token is not None
    return event.token


def merge_streams(streams: Sequence[AsyncGenerator[str]]) -> AsyncGenerator[str]:
    """Yields the events of streams as they come; the first that raises ends all."""
    return streams[0] if len(streams) == 1 else _merge(streams)


async def _merge(streams: Sequence[AsyncGenerator[str]]) -> AsyncGenerator[str]:
    queue: asyncio.Queue[str | Exception | None] = asyncio.Queue()

    async def read(stream: AsyncGenerator[str]) -> None:
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


class EventStream(Response):
    """Sends server-sent events; cancels the generations when the client goes away."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str], context: RequestContext) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._events, self._context = events, context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends all events."""
        start = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **start})
        gone = asyncio.ensure_future(self._context.cancel_when_gone())
        try:
            async with contextlib.aclosing(self._events) as events:
                async for event in events:
                    body = event.encode()
                    await send({"type": "http.response.body", "body": body, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            gone.cancel()
