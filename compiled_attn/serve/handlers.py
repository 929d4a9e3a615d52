"""The handlers of transformers for one served model, each request with a sampling of its own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi.responses import JSONResponse, StreamingResponse
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.response import ResponseHandler

from compiled_attn.serve.body import Body
from compiled_attn.serve.choices import (
    PlacedLogprobs,
    ScoredText,
    cached,
    chat_logprobs,
    completion_logprobs,
    merged,
    merged_streams,
    placed,
    whole_stream,
    with_cached,
)
from compiled_attn.serve.ended import ended_response, ended_stream
from compiled_attn.serve.errors import RequestError
from compiled_attn.serve.handler import Handler

__all__ = ["Chats", "Completions", "Responses"]


class _Choosing(Handler):
    """What has choices: each is an answer of transformers' handler, with a sampling of its own."""

    def _streaming(
        self, request_id: str, model: Any, processor: Any, name: str, asked: Any, settings: Any,
        **named: Any,
    ) -> Any:  # fmt: skip
        own = super()._streaming  # type: ignore[misc]

        def stream(prompt: Any, each: Any) -> AsyncGenerator[str, None]:
            given = own(request_id, model, processor, name, prompt, each, **named)
            return with_cached(given.body_iterator, lambda: each.result.cached_tokens)

        streams = [stream(*each) for each in asked]
        events = streams[0] if len(streams) == 1 else merged_streams(streams, settings.sampling.n)
        whole = whole_stream(events, has_usage=settings.has_usage)
        return StreamingResponse(whole, media_type="text/event-stream")

    async def _non_streaming(
        self, request_id: str, model: Any, processor: Any, name: str, asked: Any, settings: Any,
        **named: Any,
    ) -> Any:  # fmt: skip
        own = super()._non_streaming  # type: ignore[misc]

        async def answer(prompt: Any, each: Any) -> dict[str, Any]:
            given = await own(request_id, model, processor, name, prompt, each, **named)
            body: dict[str, Any] = json.loads(given.body)
            body["usage"] |= cached(each.result.cached_tokens)
            if each.sampling.logprobs is not None:  # of thousands of tokens: others go on
                told = await asyncio.to_thread(self._told, each)
                body["choices"][0]["logprobs"] = told
            return body

        answers = (answer(*each) for each in asked)
        return merged(await asyncio.gather(*answers), settings.sampling.n)

    def _told(self, settings: Any) -> dict[str, Any]:
        """The log-probabilities of an answer that has ended."""
        tokenizer = self.model_manager.served.llm.tokenizer
        ends = self.model_manager.replies.ends_of(settings.sampling)
        return self._logprobs(placed(settings.result, tokenizer, ends, echoes=settings.echoes))

    def _build_chunk_sse(self, *given: Any, **named: Any) -> str:
        event: str = super()._build_chunk_sse(*given, **named)  # type: ignore[misc]
        piece = named.get("content", named.get("text"))
        if not isinstance(piece, ScoredText):
            return event
        chunk = json.loads(event.removeprefix("data: "))
        chunk["choices"][0]["logprobs"] = self._logprobs(piece.scores)
        return f"data: {json.dumps(chunk)}\n\n"

    def _logprobs(self, scores: Sequence[PlacedLogprobs]) -> dict[str, Any]:
        raise NotImplementedError


class Chats(_Choosing, ChatCompletionHandler):  # type: ignore[misc]
    """``/v1/chat/completions``."""

    _needed = "messages"

    def _logprobs(self, scores: Sequence[PlacedLogprobs]) -> dict[str, Any]:
        return chat_logprobs(scores, self.model_manager.served.llm.tokenizer)


class Completions(_Choosing, CompletionHandler):  # type: ignore[misc]
    """``/v1/completions``, of one prompt or several, in text or token ids."""

    _needed = "prompt"
    _parses = False

    def _template_tools(self, body: Body) -> dict[str, Any]:
        """None: a text has no template."""
        return {}

    def _prompts(self, body: Body, tools: dict[str, Any]) -> Sequence[Any]:
        """The tokens of each prompt, up to the first that is too long, which refuses all."""
        if body.get("echo") and body["stream"]:
            raise RequestError("echo is not served in streams: leave it out, or do not stream")
        served, prompts = self.model_manager.served, _prompts_of(body)
        answers, most = len(prompts) * body.get("n", 1), served.engine.most_requests
        if answers > most:
            raise RequestError(
                f"expected at most {most} answers (max_waiting and max_seqs), got {answers}: send "
                "fewer prompts at a time"
            )
        encoded, processor = [], served.llm.tokenizer.of_transformers
        for each in prompts:
            encoded.append(processor(each) if isinstance(each, str) else {"input_ids": each})
            if len(encoded[-1]["input_ids"]) > served.llm.engine.sizing.context:
                break
        return encoded

    def _letters(self, body: Body) -> int:
        given = body.get("prompt")
        return max(map(_size, given), default=0) if isinstance(given, list) else _size(given)

    def _has_text(self, body: Body) -> bool:
        return isinstance(_prompts_of(body)[0], str)

    def _logprobs(self, scores: Sequence[PlacedLogprobs]) -> dict[str, Any]:
        return completion_logprobs(scores, self.model_manager.served.llm.tokenizer)


def _prompts_of(body: Body) -> Sequence[str | list[int]]:
    given: Any = body["prompt"]
    is_one = isinstance(given, str) or isinstance(given[0], int)
    return [given] if is_one else given


def _size(prompt: Any) -> int:
    return len(prompt) if isinstance(prompt, str) else 0


class Responses(Handler, ResponseHandler):  # type: ignore[misc]
    """``/v1/responses``."""

    _needed = "input"

    def _template_tools(self, body: Body) -> dict[str, Any]:
        """Its flat functions, nested as templates have them."""
        return {"tools": self._normalize_tools(body.get("tools"))}

    def _messages(self, body: Body) -> list[dict[str, Any]]:
        """Its input and instructions as the messages of a chat."""
        messages: list[dict[str, Any]] = self._normalize_input(dict(body))
        return messages

    def _echoed(self, body: Body) -> tuple[Any, ...]:
        """All of it."""
        return (body,)

    def _streaming(  # type: ignore[override]
        self, request_id: str, model: Any, processor: Any, name: str, body: Any, asked: Any,
        settings: Any, **named: Any,
    ) -> Any:  # fmt: skip
        ((prompt, own),) = asked
        given: Any = super()._streaming(
            request_id, model, processor, name, body, prompt, own, **named
        )
        whole = ended_stream(given.body_iterator, lambda response: _ended(response, own))
        return StreamingResponse(whole, media_type="text/event-stream")

    async def _non_streaming(  # type: ignore[override]
        self, request_id: str, model: Any, processor: Any, name: str, body: Any, asked: Any,
        settings: Any, **named: Any,
    ) -> Any:  # fmt: skip
        ((prompt, own),) = asked
        given: Any = await super()._non_streaming(
            request_id, model, processor, name, body, prompt, own, **named
        )
        return JSONResponse(_ended(json.loads(given.body), own))


def _ended(response: dict[str, Any], settings: Any) -> dict[str, Any]:
    """What stopped has no limit any more, see `Reply`."""
    is_cut = settings.max_new_tokens is not None
    return ended_response(response, is_cut=is_cut, cached_tokens=settings.result.cached_tokens)
