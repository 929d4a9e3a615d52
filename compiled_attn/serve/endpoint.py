"""Base of the three endpoints that generate: parsing, templates, sampling, submission."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Generic, TypeVar

from fastapi import Request
from fastapi.responses import Response

from compiled_attn.engine import GenerationResult, Grammar, RequestHandle, SamplingParams
from compiled_attn.serve.context import RequestContext
from compiled_attn.serve.http_errors import RequestError
from compiled_attn.serve.metrics import Metrics
from compiled_attn.serve.model import ServedModel
from compiled_attn.serve.output_parser import OutputParser, ParsedOutput, response_template
from compiled_attn.serve.parse import check_unicode, drop_nulls, offload, parse_body
from compiled_attn.serve.requests import GenerationRequest, TemplateRequest
from compiled_attn.serve.streaming import EventStream, EventWriter, ParsedEvents, TextEvents
from compiled_attn.text import AnswerPieces, Tokenizer
from compiled_attn.text.answer import Answer
from graphs.errors import clipped, quoted

__all__ = ["Endpoint", "TemplateEndpoint", "finish_reason"]

RequestT = TypeVar("RequestT", bound=GenerationRequest)
TemplateT = TypeVar("TemplateT", bound=TemplateRequest)

_PAUSE_OF_REQUEST_S, _SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.00025, 0.001, 0.02
_MANY_TOKENS = 1000  # of answers that a thread decodes and parses
_MIN_CHARACTERS = 2**16  # of a prompt that is always tokenized


class Endpoint(ABC, Generic[RequestT]):
    """Answers requests of one type with a model."""

    request_type: ClassVar[type[Any]]
    id_prefix: ClassVar[str]

    def __init__(self, model: ServedModel, metrics: Metrics) -> None:
        self._model, self._metrics = model, metrics

    async def handle(self, http: Request) -> Response:
        """Answers a request.

        Parsing, templates and tokenization run in worker threads, and end early when the client
        goes away.

        Raises:
            RequestError: it cannot be served.
        """
        self._model.check_accepts_requests()
        context: RequestContext = http.scope["compiled_attn"]
        raw = await http.body()
        context.response_id = self.id_prefix + context.key
        try:
            work = offload(len(raw), self._parse_and_submit, raw, context)
            request, sampling = await context.unless_gone(work)
            if sampling.grammar is not None:
                await self._compile_grammar(sampling.grammar, context)
                again = offload(len(raw), self._submit, request, sampling, context)
                await context.unless_gone(again)
        except ValueError as error:
            raise RequestError(str(error)) from error
        except RecursionError as error:
            raise RequestError(
                "expected a body of few levels, got one that is nested too deep: flatten it"
            ) from error
        handles = context.handles
        if request.stream:
            return EventStream(self._stream(request, handles, context), context)
        results = await context.unless_gone(asyncio.gather(*handles))
        if failed := [result.error for result in results if result.error]:
            raise RuntimeError(failed[0])
        tokens = sum(len(result.tokens) for result in results)
        if tokens > _MANY_TOKENS or any(result.logprobs is not None for result in results):
            content = await asyncio.to_thread(self._respond, request, results, context)
        else:
            content = self._respond(request, results, context)
        return Response(content, media_type="application/json")

    @abstractmethod
    def _tokenize(self, request: RequestT) -> Sequence[list[int]]:
        """Returns the token ids of each prompt."""

    @abstractmethod
    def _stream(
        self, request: RequestT, handles: Sequence[RequestHandle], context: RequestContext
    ) -> AsyncGenerator[str]:
        """Yields server-sent events."""

    @abstractmethod
    def _respond(
        self, request: RequestT, results: Sequence[GenerationResult], context: RequestContext
    ) -> str:
        """Returns the JSON of a whole response."""

    def _parse(self, raw: bytes) -> RequestT:
        body = drop_nulls(parse_body(raw))
        if b"\\u" in raw:
            check_unicode(body)
        llm = self._model.llm
        context = llm.engine.sizing.context
        # Before it is validated or tokenized.
        most = max(context * llm.tokenizer.longest, _MIN_CHARACTERS)
        if (count := self.request_type.count_prompt_characters(body)) > most:
            raise RequestError(
                f"expected a prompt of at most {most} letters, as the context holds {context} "
                f"tokens, got {count}: shorten it"
            )
        request: RequestT = self.request_type.parse(body)
        if request.model is not None and request.model not in self._model.names:
            raise RequestError(
                f"expected the model {self._model.name!r}, got {quoted(request.model)}: GET "
                "/v1/models",
                404,
            )
        return request

    def _sampling(self, request: RequestT) -> SamplingParams:
        """Returns the sampling; raises RequestError for what this model does not serve."""
        sampling = request.sampling(self._model.llm.model.generation_config)
        is_adapter = request.model not in (None, self._model.name)
        return replace(sampling, adapter=request.model) if is_adapter else sampling

    def _name_of(self, request: RequestT) -> str:
        """The model of the answer: the adapter that was asked for, or the model itself."""
        return request.model or self._model.name

    def _parse_and_submit(
        self, raw: bytes, context: RequestContext
    ) -> tuple[RequestT, SamplingParams]:
        """Submits the generations too, unless their grammar must be compiled before."""
        request = self._parse(raw)
        sampling = self._sampling(request)
        if sampling.grammar is None:
            self._submit(request, sampling, context)
        return request, sampling

    async def _compile_grammar(self, grammar: Grammar, context: RequestContext) -> None:
        """Compiles the grammar of the answer, which may take seconds, while others go on."""
        compiled = self._model.llm.grammars.known(grammar)
        if compiled is None:
            work = self._model.grammars.compiled(grammar, context.client)
            compiled = await context.unless_gone(work)
        context.held.append(compiled)  # or others could push it out of the cache before its use

    def _submit(self, request: RequestT, sampling: SamplingParams, context: RequestContext) -> None:
        """Submits all answers to all prompts, or none."""
        prompts = self._tokenize(request)
        pairs = [(prompt, self._limited(request, prompt, sampling)) for prompt in prompts]
        context.add(self._model.engine.submit_together(pairs, salt=context.salt))

    async def _stream_answer(
        self, request: RequestT, handle: RequestHandle, writer: EventWriter
    ) -> AsyncGenerator[str]:
        """Yields the events of an answer as its tokens come; raises RuntimeError if it fails."""
        events = self._events(request, handle, writer)
        if start := writer.start() + events.start():
            yield start
        last_s: float | None = None
        first_gaps = 0
        try:
            while batch := await handle.read():
                now_s, result = time.perf_counter(), batch[-1].result
                error = result.error if result is not None else ""
                tokens = batch[:-1] if error else batch
                if last_s is not None and tokens:
                    gap_s = (now_s - last_s) / len(tokens)
                    self._metrics.observe_gaps(gap_s, first_gaps + len(tokens))
                    first_gaps = 0
                elif len(tokens) > 1 and result is not None:  # the engine has timed all of them
                    gaps = len(result.tokens) - 1
                    self._metrics.observe_gaps((result.latency_s - result.ttft_s) / gaps, gaps)
                else:  # tokens have no times of their own: these count with the next write's
                    first_gaps = max(len(tokens) - 1, 0)
                last_s = now_s
                text = events.put(tokens)
                if result is not None and not error:
                    text += events.finish() + writer.finish(result)
                if text:
                    yield text
                if error:
                    raise RuntimeError(error)
                if result is None and (seconds := self._pause_s()) > _SHORTEST_PAUSE_S:
                    await asyncio.sleep(seconds)
        finally:
            handle.cancel()

    def _pause_s(self) -> float:
        """Limits the time that writing takes when there are many streams.

        A write costs about as much however many tokens it has. Requests that wait write nothing.
        """
        running = self._model.running_requests
        return min(running * _PAUSE_OF_REQUEST_S, _LONGEST_PAUSE_S)

    def _limited(
        self, request: RequestT, prompt: list[int], sampling: SamplingParams
    ) -> SamplingParams:
        """Without a limit an answer gets the room that the prompt leaves in the context."""
        if request.token_limit is not None:
            return sampling
        room = self._model.llm.engine.sizing.context - len(prompt)
        return replace(sampling, max_new_tokens=max(min(room, sampling.max_new_tokens), 1))

    def _events(self, request: RequestT, handle: RequestHandle, writer: EventWriter) -> TextEvents:
        """Returns what makes the events of one answer."""
        ends, tokenizer = self._end_tokens(handle.sampling), self._tokenizer
        pieces = AnswerPieces(tokenizer, handle.sampling, ends)
        return TextEvents(writer, pieces, ends, tokenizer)

    def _output(self, request: RequestT, result: GenerationResult) -> ParsedOutput:
        """Returns the parts of a whole answer."""
        ends = self._end_tokens(result.sampling)
        return ParsedOutput(Answer.of(result, self._tokenizer, ends).text)

    def _end_tokens(self, sampling: SamplingParams) -> frozenset[int]:
        return frozenset(self._model.llm.engine.end_tokens(sampling))

    @property
    def _tokenizer(self) -> Tokenizer:
        return self._model.llm.tokenizer


class TemplateEndpoint(Endpoint[TemplateT]):
    """An endpoint whose prompts are rendered by the model's chat template, and answers parsed."""

    def _sampling(self, request: TemplateT) -> SamplingParams:
        sampling, llm = super()._sampling(request), self._model.llm
        if request.tools and "tools" not in str(llm.tokenizer.of_transformers.chat_template):
            raise RequestError(
                f"tools are not served: the chat template of {self._model.name} does not show "
                "them to the model: leave them out, or serve a model that calls tools"
            )
        # A parser reads tokens: it would show what a stop string hides, and hides some itself.
        refused = "stop" if sampling.stop else "logprobs" if sampling.logprobs is not None else ""
        if refused and response_template(llm) is not None:
            raise RequestError(
                f"{refused} is not served in chats of a model whose answers are parsed for tool "
                "calls and thoughts: leave it out, or take /v1/completions"
            )
        return sampling

    def _tokenize(self, request: TemplateT) -> Sequence[list[int]]:
        tokenizer = self._tokenizer.of_transformers
        try:
            inputs: Mapping[str, list[int]] = tokenizer.apply_chat_template(
                request.template_messages(),
                add_generation_prompt=True,
                return_dict=True,
                tokenize=True,
                tools=request.template_tools(),
                **request.chat_template_kwargs,
            )
        except Exception as error:  # a template is a program of the model's
            reason = clipped(" ".join(f"{type(error).__name__}: {error}".split()), 300)
            raise RequestError(
                f"expected messages, tools and chat_template_kwargs that the chat template of "
                f"{self._model.name} takes, got {reason}: change them"
            ) from error
        tokens = inputs["input_ids"]
        if self._tokenizer.special.issuperset(tokens):
            raise RequestError("expected a prompt with text, got special tokens only")
        return [tokens]

    def _events(self, request: TemplateT, handle: RequestHandle, writer: EventWriter) -> TextEvents:
        parser = self._parser(request, handle.prompt)
        return ParsedEvents(writer, parser) if parser else super()._events(request, handle, writer)

    def _output(self, request: TemplateT, result: GenerationResult) -> ParsedOutput:
        parser = self._parser(request, result.prompt)
        return parser.parse(result.tokens) if parser else super()._output(request, result)

    def _parser(self, request: TemplateT, prompt: Sequence[int]) -> OutputParser | None:
        if (template := response_template(self._model.llm)) is None:
            return None
        return OutputParser(self._model.llm, template, prompt, request.template_tools())


def finish_reason(result: GenerationResult, *, has_tool_calls: bool = False) -> Any:
    """Returns the finish reason in the words of the protocol."""
    if has_tool_calls:
        return "tool_calls"
    return "length" if result.finish_reason == "length" else "stop"
