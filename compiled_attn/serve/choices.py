"""Several answers to one request, and log-probabilities, in the shapes of the OpenAI protocol."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple

from fastapi.responses import JSONResponse

from compiled_attn.engine import GenerationResult, TokenLogprobs
from compiled_attn.text import TextPieces, Tokenizer
from compiled_attn.text.tokenizer import REPLACEMENT

__all__ = [
    "PlacedLogprobs",
    "Places",
    "ScoredText",
    "cached",
    "chat_logprobs",
    "completion_logprobs",
    "merged",
    "merged_streams",
    "placed",
    "whole_stream",
    "with_cached",
]

_USED = '"usage":'  # in a text that is JSON a quotation mark has a backslash before it


class PlacedLogprobs(NamedTuple):
    """A token with its log-probabilities, and how many characters of the text are before it.

    The first token of a prompt has none, as nothing precedes it.
    """

    token: int
    scores: TokenLogprobs | None
    offset: int


class Places:
    """Puts the tokens of one text to their places in it.

    Args:
        tokenizer: that of the model.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._pieces = TextPieces(tokenizer)
        self._told = 0

    def of(self, token: int, scores: TokenLogprobs | None) -> PlacedLogprobs:
        """The next token in its place: behind the whole characters before it."""
        offset = self._told + len(self._pieces.rest().rstrip(REPLACEMENT))
        self._told += len(self._pieces.put(token))
        return PlacedLogprobs(token, scores, offset)


def placed(
    result: GenerationResult, tokenizer: Tokenizer, ends: Set[int], *, echoes: bool
) -> list[PlacedLogprobs]:
    """The tokens of a finished answer in their places.

    Args:
        result: the answer, whose sampling asks for log-probabilities.
        tokenizer: that of the model.
        ends: tokens that end it, and are no part of it.
        echoes: whether its prompt is before it. Then a token that ends it stays: who scores texts
            takes one token off the end.
    """
    places = Places(tokenizer)
    own = [(each.token, each) for each in result.logprobs or ()]
    if not echoes:
        return [places.of(*each) for each in own if each[0] not in ends]
    prompt = zip(result.prompt, result.prompt_logprobs or (), strict=True)
    return [places.of(*each) for each in (*prompt, *own)]


class ScoredText(str):
    """A piece of an answer with the log-probabilities of the tokens that it ends with.

    Attributes:
        scores: of these tokens.
    """

    scores: Sequence[PlacedLogprobs]

    def __new__(cls, text: str, scores: Sequence[PlacedLogprobs]) -> ScoredText:
        """The text, and what comes with it."""
        made = super().__new__(cls, text)
        made.scores = scores
        return made


def chat_logprobs(placed: Sequence[PlacedLogprobs], tokenizer: Tokenizer) -> dict[str, Any]:
    """Those of an answer in a chat."""

    def told(token: int, logprob: float) -> dict[str, Any]:
        text, own = tokenizer.text_of(token), [*tokenizer.bytes_of(token)]
        return {"token": text, "bytes": own, "logprob": logprob}

    return {
        "content": [
            {
                **told(token, scores.logprob),
                "top_logprobs": [told(*pair) for pair in scores.top],
            }
            for token, scores, _ in placed
            if scores is not None
        ]
    }


def completion_logprobs(placed: Sequence[PlacedLogprobs], tokenizer: Tokenizer) -> dict[str, Any]:
    """Those of a text that is continued."""

    def likely(scores: TokenLogprobs) -> dict[str, float]:
        return {tokenizer.text_of(token): logprob for token, logprob in reversed(scores.top)}

    return {
        "tokens": [tokenizer.text_of(token) for token, _, _ in placed],
        "token_logprobs": [scores and scores.logprob for _, scores, _ in placed],
        "top_logprobs": [scores and likely(scores) for _, scores, _ in placed],
        "text_offset": [offset for _, _, offset in placed],
    }


def merged(bodies: Sequence[dict[str, Any]], choices: int) -> JSONResponse:
    """One answer of several, each of which has one choice.

    Args:
        bodies: the answers, those of a prompt in a row.
        choices: of each prompt.
    """
    whole = bodies[0]
    whole["choices"] = [
        {**choice, "index": at} for at, body in enumerate(bodies) for choice in body["choices"]
    ]
    whole["usage"] = _sum_of([body["usage"] for body in bodies], choices)
    return JSONResponse(whole)


def _sum_of(usages: Sequence[Mapping[str, Any]], choices: int) -> dict[str, Any]:
    """What several answers used; a prompt counts once, by the first of its answers."""
    firsts = usages[::choices]
    prompt = sum(each["prompt_tokens"] for each in firsts)
    own = sum(each["completion_tokens"] for each in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": own,
        "total_tokens": prompt + own,
        **cached(sum(each["prompt_tokens_details"]["cached_tokens"] for each in firsts)),
    }


def cached(tokens: int) -> dict[str, Any]:
    """How many tokens of a prompt were cached, as usage tells it."""
    return {"prompt_tokens_details": {"cached_tokens": tokens}}


async def with_cached(
    events: AsyncGenerator[str, None], tokens: Callable[[], int]
) -> AsyncGenerator[str, None]:
    """A stream of one answer whose usage tells the cached tokens too.

    Args:
        events: of which the last tells what was used.
        tokens: how many they are; asked with that one.
    """
    async with contextlib.aclosing(events):
        async for event in events:
            if _USED in event:
                chunk = json.loads(event.removeprefix("data: "))
                chunk["usage"] |= cached(tokens())
                event = _event(chunk)
            yield event


async def whole_stream(events: AsyncGenerator[str, None], *, has_usage: bool) -> AsyncIterator[str]:
    """A stream to its end, as the protocol has it.

    Args:
        events: of one answer, or of several that are merged; the last tells what was used.
        has_usage: that is passed on, in an event of its own, without a choice.
    """
    async with contextlib.aclosing(events):
        async for event in events:
            yield _last(event, has_usage=has_usage) if _USED in event else event
    yield "data: [DONE]\n\n"


def _last(event: str, *, has_usage: bool) -> str:
    chunk = json.loads(event.removeprefix("data: "))
    usage = chunk.pop("usage")
    apart = _event({**chunk, "choices": [], "usage": usage}) if has_usage else ""
    return _event(chunk) + apart


def _event(chunk: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(chunk)}\n\n"


async def merged_streams(
    streams: Sequence[AsyncIterator[str]], choices: int
) -> AsyncGenerator[str, None]:
    """The events of several streams as they come, each with the index of its choice.

    The last one tells what all of them used. With the first that fails all end.

    Args:
        streams: of one answer each, those of a prompt in a row.
        choices: of each prompt.
    """
    queue: asyncio.Queue[tuple[int, str | Exception | None]] = asyncio.Queue()
    usages: dict[int, dict[str, Any]] = {}

    async def read(at: int, stream: AsyncIterator[str]) -> None:
        try:
            async for text in stream:
                for event in text.split("\n\n"):
                    if event:
                        queue.put_nowait((at, event))
            queue.put_nowait((at, None))
        except Exception as error:
            queue.put_nowait((at, error))

    tasks = [asyncio.ensure_future(read(at, stream)) for at, stream in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            at, event = await queue.get()
            if event is None:
                left -= 1
                continue
            if isinstance(event, Exception):
                raise event
            chunk = json.loads(event.removeprefix("data: "))
            for choice in chunk.get("choices", ()):
                choice["index"] = at
            if usage := chunk.pop("usage", None):
                usages[at] = usage
                if len(usages) == len(tasks):
                    chunk["usage"] = _sum_of([usages[at] for at in sorted(usages)], choices)
            yield _event(chunk)
            if "error" in chunk:
                return
    finally:
        for task in tasks:
            task.cancel()
