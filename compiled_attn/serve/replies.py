"""Replies of the engine in the form that transformers' handlers send on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tokenizers.decoders import DecodeStream
from transformers.cli.serving.utils import (
    BaseGenerateManager,
    _StreamError,
    response_events_to_chunks,
)

from compiled_attn.engine import GenerationResult, RequestHandle, SamplingParams
from compiled_attn.serve.call import current_call
from compiled_attn.serve.choices import PlacedLogprobs, Places, ScoredText
from compiled_attn.serve.errors import RequestError
from compiled_attn.serve.served import Served
from compiled_attn.text.answer import Answer, AnswerPieces, echo_of

__all__ = ["Replies", "Reply"]


class Reply:
    """One answer that streams: pieces of text in a queue, None behind the last one.

    With log-probabilities the pieces of a text are `ScoredText`.

    Args:
        request: that is generated.
        settings: of the request, whose limit the handler looks at when it has ended.
        pieces: of its text.
        parser: of tool calls and thoughts in the text; None: text is text.
        ends: tokens that end it, and are no part of its text.
        places: of its tokens in its text.
        observe_gap: called with the seconds between two tokens.

    Attributes:
        queue: what the handler sends on.
        total_tokens: generated so far.
    """

    def __init__(
        self,
        request: RequestHandle,
        settings: Any,
        pieces: Any,
        parser: Any,
        ends: frozenset[int],
        places: Places,
        observe_gap: Callable[[float], None],
    ) -> None:
        self.queue: asyncio.Queue[Any] = asyncio.Queue()
        self.total_tokens = 0
        self._request, self._settings, self._ends = request, settings, ends
        self._pieces, self._parser = pieces, parser
        self._scores: list[PlacedLogprobs] = []
        self._places, self._observe_gap = places, observe_gap
        if parser is not None:
            self._show(parser.initial_events)
        self._task = asyncio.get_running_loop().create_task(self._run())

    def cancel(self) -> None:
        """The client has gone: the request is dropped, its blocks are free."""
        self._request.cancel()

    async def _run(self) -> None:
        try:
            last_s = 0.0
            async for event in self._request:
                now_s = time.perf_counter()
                if last_s:
                    self._observe_gap(now_s - last_s)
                last_s = now_s
                if event.result is not None:
                    _note_end(event.result, self._settings)
                self.total_tokens += 1
                if event.logprobs is not None and event.token not in self._ends:
                    self._scores.append(self._places.of(event.logprobs.token, event.logprobs))
                self._tell(self._pieces.put(event.token))
            self._tell(self._pieces.rest())
            if self._scores:  # of tokens that no text came of
                self.queue.put_nowait(ScoredText("", self._scores))
            if self._parser is not None:
                with contextlib.suppress(ValueError, RuntimeError):  # it ended within a call
                    self._show(self._parser.finalize()[1])
            self.queue.put_nowait(None)
        except Exception as error:
            # The handlers put it into JSON as it is.
            self.queue.put_nowait(_StreamError(json.dumps(str(error))[1:-1]))

    def _tell(self, text: str) -> None:
        if text and self._scores:
            scores, self._scores = self._scores, []
            self.queue.put_nowait(ScoredText(text, scores))
        elif text and self._parser is None:
            self.queue.put_nowait(text)
        elif text:
            self._show(self._parser.feed(text))

    def _show(self, events: Sequence[Any]) -> None:
        for item in response_events_to_chunks([*events]):
            self.queue.put_nowait(item)


def _note_end(result: GenerationResult, settings: Any) -> None:
    """Raises RuntimeError for a failed request; one that stopped did not reach its limit."""
    if result.error:
        raise RuntimeError(result.error)
    settings.result = result
    if result.finish_reason == "stop":
        settings.max_new_tokens = None  # the handlers compare lengths with it


class _Marked:
    """Pieces of text with the special tokens that a parser looks for."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream([], skip_special_tokens=False)
        self._tokens: list[int] = []
        self._told = 0

    def put(self, token: int) -> str:
        self._tokens.append(token)
        text: str = self._stream.step(self._tokenizer, token) or ""
        self._told += len(text)
        return text

    def rest(self) -> str:
        text: str = self._tokenizer.decode(self._tokens, skip_special_tokens=False)
        return text[self._told :]


class Replies(BaseGenerateManager):
    """What transformers' handlers take for a continuous batch: each request is one of the engine's.

    Args:
        served: the model.
    """

    def __init__(self, served: Served) -> None:
        self._served = served

    def generate_streaming(
        self,
        model: Any,
        processor: Any,
        inputs: Any,
        gen_config: Any,
        request_id: str,
        response_parser: Any = None,
    ) -> tuple[asyncio.Queue[Any], Any]:
        """The queue of a reply, and the reply."""
        request: RequestHandle = gen_config.request
        tokenizer, ends = self._served.llm.tokenizer, self.ends_of(request.sampling)
        pieces: Any = _Marked(processor._tokenizer)
        if response_parser is None:
            pieces = AnswerPieces(tokenizer, request.sampling, ends)
        places, observe = Places(tokenizer), self._served.metrics.observe_gap
        reply = Reply(request, gen_config, pieces, response_parser, ends, places, observe)
        return reply.queue, reply

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> tuple[str, int, list[int]]:
        """The text of a reply, tokens of its prompt, and its own tokens."""
        prompt = inputs["input_ids"]
        request: RequestHandle = gen_config.request
        result = await current_call().unless_gone(request)
        _note_end(result, gen_config)
        tokenizer, ends = self._served.llm.tokenizer, self.ends_of(request.sampling)
        if gen_config.echoes:
            return echo_of(result, tokenizer, ends), len(prompt), result.tokens
        return Answer.of(result, tokenizer, ends).text, len(prompt), result.tokens

    def stop(self) -> None:
        """The engine is stopped where it was started."""

    def submit(self, prompts: Sequence[list[int]], settings: Any) -> list[RequestHandle]:
        """Submits what is asked for: all answers to all prompts, or none."""
        asked = [(prompt, self._limited(prompt, settings)) for prompt in prompts]
        call = current_call()
        requests = self._served.engine.submit_together(asked, salt=call.salt)
        return [call.owns(request) for request in requests]

    def _limited(self, prompt: list[int], settings: Any) -> SamplingParams:
        """The sampling of a prompt, which has the room that is left if it does not say how much."""
        sampling: SamplingParams = settings.sampling
        if settings.has_text and self._served.llm.tokenizer.special.issuperset(prompt):
            raise RequestError("expected a prompt with text, got special tokens only")
        if not settings.is_limited:
            room = self._served.llm.engine.sizing.context - len(prompt)
            settings.max_new_tokens = max(min(room, sampling.max_new_tokens), 1)
            return replace(sampling, max_new_tokens=settings.max_new_tokens)
        return sampling

    def ends_of(self, sampling: SamplingParams) -> frozenset[int]:
        """Tokens that end an answer, and are no part of its text."""
        return frozenset(self._served.llm.engine.end_tokens(sampling))
