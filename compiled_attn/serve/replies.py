"""Replies of the engine in the form that transformers' handlers send on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tokenizers.decoders import DecodeStream
from transformers.cli.serving.utils import (
    BaseGenerateManager,
    _StreamError,
    response_events_to_chunks,
)

from compiled_attn.engine import RequestHandle, SamplingParams
from compiled_attn.serve.errors import RequestError
from compiled_attn.serve.salt import current_salt
from compiled_attn.serve.served import Served
from compiled_attn.text.answer import Answer, AnswerPieces

__all__ = ["Replies", "Reply"]

_ENOUGH_TOKENS = 1024
"""Of a request that does not say how many it wants."""


class Reply:
    """One answer that streams: pieces of text in a queue, None behind the last one.

    Args:
        request: that is generated.
        pieces: of its text.
        parser: of tool calls and thoughts in the text; None: text is text.

    Attributes:
        queue: what the handler sends on.
        total_tokens: generated so far.
    """

    def __init__(self, request: RequestHandle, pieces: Any, parser: Any) -> None:
        self.queue: asyncio.Queue[Any] = asyncio.Queue()
        self.total_tokens = 0
        self._request, self._pieces, self._parser = request, pieces, parser
        if parser is not None:
            self._show(parser.initial_events)
        self._task = asyncio.get_running_loop().create_task(self._run())

    def cancel(self) -> None:
        """The client has gone: the request is dropped, its blocks are free."""
        self._request.cancel()

    async def _run(self) -> None:
        try:
            async for event in self._request:
                if event.result is not None and event.result.error:
                    raise RuntimeError(event.result.error)
                self.total_tokens += 1
                self._tell(self._pieces.put(event.token))
            self._tell(self._pieces.rest())
            self.queue.put_nowait(None)
        except Exception as error:
            self.queue.put_nowait(_StreamError(str(error).replace('"', "'")))

    def _tell(self, text: str) -> None:
        if text and self._parser is None:
            self.queue.put_nowait(text)
        elif text:
            self._show(self._parser.feed(text))

    def _show(self, events: Sequence[Any]) -> None:
        for item in response_events_to_chunks([*events]):
            self.queue.put_nowait(item)


class _Marked:
    """Pieces of text with the special tokens that a parser looks for."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream([], skip_special_tokens=False)

    def put(self, token: int) -> str:
        return self._stream.step(self._tokenizer, token) or ""

    def rest(self) -> str:
        return ""


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
        request, sampling = self._submit(inputs["input_ids"], gen_config)
        pieces: Any = _Marked(processor._tokenizer)
        if response_parser is None:
            pieces = AnswerPieces(self._served.llm.tokenizer, sampling, self._ends(sampling))
        reply = Reply(request, pieces, response_parser)
        return reply.queue, reply

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> tuple[str, int, list[int]]:
        """The text of a reply, tokens of its prompt, and its own tokens."""
        prompt = inputs["input_ids"]
        request, sampling = self._submit(prompt, gen_config)
        result = await request
        if result.error:
            raise RuntimeError(result.error)
        answer = Answer.of(result, self._served.llm.tokenizer, self._ends(sampling))
        return answer.text, len(prompt), result.tokens

    def stop(self) -> None:
        """The engine is stopped where it was started."""

    def _submit(self, prompt: list[int], settings: Any) -> tuple[RequestHandle, SamplingParams]:
        sampling: SamplingParams = settings.sampling
        if self._served.llm.tokenizer.special.issuperset(prompt):
            raise RequestError("expected a prompt with text, got special tokens only")
        if settings.max_new_tokens is None:
            room = self._served.llm.engine.sizing.context - len(prompt)
            settings.max_new_tokens = max(min(room, _ENOUGH_TOKENS), 1)
            sampling = replace(sampling, max_new_tokens=settings.max_new_tokens)
        request = self._served.engine.submit(prompt, sampling, salt=current_salt())
        return request, sampling

    def _ends(self, sampling: SamplingParams) -> frozenset[int]:
        return frozenset(self._served.llm.engine.end_tokens(sampling))
