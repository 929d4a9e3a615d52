"""Several answers to one request, and log-probabilities, in the shapes of the OpenAI protocol."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from fastapi.responses import JSONResponse

from compiled_attn.engine import TokenLogprobs
from compiled_attn.text import Tokenizer

__all__ = ["ScoredText", "chat_logprobs", "completion_logprobs", "merged", "merged_streams"]


class ScoredText(str):
    """A piece of an answer with the log-probabilities of the tokens that it ends with.

    Attributes:
        scores: of these tokens.
        offset: characters of the answer before it.
    """

    scores: Sequence[TokenLogprobs]
    offset: int

    def __new__(cls, text: str, scores: Sequence[TokenLogprobs], offset: int) -> ScoredText:
        """The text, and what comes with it."""
        made = super().__new__(cls, text)
        made.scores, made.offset = scores, offset
        return made


def chat_logprobs(scores: Sequence[TokenLogprobs], tokenizer: Tokenizer) -> dict[str, Any]:
    """Those of an answer in a chat."""

    def told(token: int, logprob: float) -> dict[str, Any]:
        text = tokenizer.text_of(token)
        return {"token": text, "bytes": [*text.encode()], "logprob": logprob}

    return {
        "content": [
            {
                **told(each.token, each.logprob),
                "top_logprobs": [told(*pair) for pair in each.top],
            }
            for each in scores
        ]
    }


def completion_logprobs(
    scores: Sequence[TokenLogprobs], tokenizer: Tokenizer, offset: int
) -> dict[str, Any]:
    """Those of a text, which begins at a character of the answer."""
    tokens = [tokenizer.text_of(each.token) for each in scores]
    offsets = [offset + sum(map(len, tokens[:at])) for at in range(len(tokens))]
    return {
        "tokens": tokens,
        "token_logprobs": [each.logprob for each in scores],
        "top_logprobs": [
            {tokenizer.text_of(token): logprob for token, logprob in reversed(each.top)}
            for each in scores
        ],
        "text_offset": offsets,
    }


def merged(bodies: Sequence[dict[str, Any]]) -> JSONResponse:
    """One answer of the choices of several, each of which has one."""
    whole = bodies[0]
    whole["choices"] = [
        {**choice, "index": at} for at, body in enumerate(bodies) for choice in body["choices"]
    ]
    whole["usage"] = _sum_of([body["usage"] for body in bodies])
    return JSONResponse(whole)


def _sum_of(usages: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """What several answers to one prompt used, which counts once."""
    prompt = usages[0]["prompt_tokens"]
    own = sum(each["completion_tokens"] for each in usages)
    return {"prompt_tokens": prompt, "completion_tokens": own, "total_tokens": prompt + own}


async def merged_streams(streams: Sequence[AsyncIterator[str]]) -> AsyncIterator[str]:
    """The events of several streams as they come, each with the index of its choice.

    The last one tells what all of them used. With the first that fails all end.
    """
    queue: asyncio.Queue[tuple[int, str | Exception | None]] = asyncio.Queue()
    usages: list[dict[str, int]] = []

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
                usages.append(usage)
                if len(usages) == len(tasks):
                    chunk["usage"] = _sum_of(usages)
            yield f"data: {json.dumps(chunk)}\n\n"
            if "error" in chunk:
                return
    finally:
        for task in tasks:
            task.cancel()
