"""The handlers of transformers for one served model, each request with a sampling of its own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any, ClassVar

from fastapi.responses import JSONResponse, StreamingResponse
from jinja2 import TemplateError
from transformers import GenerationConfig
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.utils import Modality, get_response_template

from compiled_attn.engine import RequestHandle, SamplingParams
from compiled_attn.serve.body import (
    EXTENSIONS,
    Body,
    check_body,
    grammar_of,
    sampling_of,
    without_nulls,
)
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
from compiled_attn.serve.replies import Replies
from compiled_attn.serve.served import Served
from compiled_attn.text import LLM

__all__ = ["Chats", "Completions", "OneModel", "Responses"]

_FEW = 2**16  # letters of a prompt, which take no time


class OneModel:
    """What the handlers take for a manager of models and of their generation: there is one.

    Args:
        served: the model.
    """

    force_model = None

    def __init__(self, served: Served) -> None:
        self.served = served
        self.replies = Replies(served)

    def use_continuous_batching(self, model: Any, modality: Any) -> bool:
        """Always."""
        return True

    def get_manager(self, model_id: str, use_cb: bool = False) -> Replies:
        """The one there is."""
        return self.replies

    def get_model_modality(self, model: Any, processor: Any = None) -> Modality:
        """Text."""
        return Modality.LLM

    def list_models(self) -> list[dict[str, Any]]:
        """The model as the protocol lists it."""
        return [
            {"id": self.served.name, "object": "model", "created": 0, "owned_by": "compiled-attn"}
        ]

    get_gen_models = list_models  # as transformers 5.23 calls it

    def shutdown(self) -> None:
        """Serves what is running, and ends."""
        self.served.stop()

    def is_cb_alive(self) -> bool:
        """Whether nothing has ended the start."""
        return self.served.error is None


class _Handler:
    """What is our own of each handler: checks, the model, the sampling."""

    _unused_fields: ClassVar[set[str]] = set()
    _needed: ClassVar[str]
    _parses: ClassVar[bool] = True
    model_manager: OneModel

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
        """The answer to a request.

        Raises:
            RequestError: it cannot be served.
        """
        try:
            body = without_nulls(body)
            check_body(body, self._needed)
            self._refuse_unseen(body)
            self._refuse_endless(body)
            body.setdefault("stream", False)
            await self._compile_grammar(body)
            return await self._answer(body, request_id)
        except (TemplateError, ValueError) as error:
            raise RequestError(str(error)) from error
        except RecursionError as error:
            raise RequestError(
                "expected a body of few levels, got one that is nested too deep: flatten it"
            ) from error

    async def _answer(self, body: Body, request_id: str) -> Any:
        """As transformers does it."""
        return await super().handle_request(body, request_id)  # type: ignore[misc]

    def _refuse_unseen(self, body: Body) -> None:
        """Refuses tools that the model would not be told of."""
        template = self.model_manager.served.llm.tokenizer.of_transformers.chat_template
        if body.get("tools") and "tools" not in str(template):
            raise RequestError(
                f"tools are not served: the chat template of {self.model_manager.served.name} does "
                "not show them to the model: leave them out, or serve a model that calls tools"
            )

    def _refuse_endless(self, body: Body) -> None:
        """Refuses what no tokens of the context can spell: counting its tokens takes a second for
        200,000 letters, and but for completions nobody is answered meanwhile.
        """
        llm = self.model_manager.served.llm
        context = llm.engine.sizing.context
        most = max(context * llm.tokenizer.longest, _FEW)
        if (letters := self._letters(body)) > most:
            raise RequestError(
                f"expected a prompt of at most {most} letters, as the context holds {context} "
                f"tokens, got {letters}: shorten it"
            )

    def _letters(self, body: Body) -> int:
        """Of its longest prompt."""
        asked = [body[name] for name in (self._needed, "instructions", "tools") if name in body]
        return len(json.dumps(asked, ensure_ascii=False))

    async def _compile_grammar(self, body: Body) -> None:
        """Compiles what the format asks for, which may take seconds, while others go on; not before
        all else is found right.
        """
        if (grammar := grammar_of(body)) is None:
            return
        self._validate_request(body)
        self._resolve_model(body)
        served = self.model_manager.served
        sampling_of(body, served.llm.model.generation_config)
        await asyncio.wrap_future(served.engine.compiled(grammar))

    def _validate_request(self, body: Body) -> None:
        known = self._valid_params_class.__mutable_keys__ | EXTENSIONS  # type: ignore[attr-defined]
        if unknown := sorted(body.keys() - known):
            raise RequestError(f"expected fields of the protocol, got {', '.join(unknown)}")

    def _resolve_model(self, body: Body) -> tuple[str, Any, Any]:
        served = self.model_manager.served
        if body.get("model") not in (None, served.name):
            raise RequestError(
                f"expected the model {served.name!r}, got {body['model']!r}: GET /v1/models", 404
            )
        llm = served.llm
        return served.name, llm.model, llm.tokenizer.of_transformers

    def _build_generation_config(
        self, body: Body, model_generation_config: GenerationConfig, use_cb: bool = False
    ) -> Any:
        llm = self.model_manager.served.llm
        sampling, is_limited = sampling_of(body, model_generation_config)
        unparsed = "stop" if sampling.stop else "logprobs" if sampling.logprobs is not None else ""
        if unparsed and self._parses:
            _refuse_parsed(llm, unparsed)
        settings = _settings(sampling)
        settings.is_limited, settings.has_text = is_limited, self._has_text(body)
        settings.echoes = body.get("echo", False)
        settings.has_usage = body.get("stream_options", {}).get("include_usage", False)
        return settings

    def _has_text(self, body: Body) -> bool:
        """Whether its prompt is text, which special tokens alone are not."""
        return True


def _settings(sampling: SamplingParams, request: RequestHandle | None = None) -> Any:
    """A sampling where the handlers of transformers look for one, and what it was submitted as."""
    settings: Any = GenerationConfig(max_new_tokens=sampling.max_new_tokens)
    settings.sampling, settings.request = sampling, request
    return settings


def _refuse_parsed(llm: LLM, name: str) -> None:
    """A parser reads tokens: it would show what a stop string hides, and hides some itself."""
    if get_response_template(llm.tokenizer.of_transformers, llm.model) is not None:
        raise RequestError(
            f"{name} is not served in chats of a model whose answers are parsed for tool calls and "
            "thoughts: leave it out, or take /v1/completions"
        )


class _Choosing(_Handler):
    """What has choices: each is an answer of transformers' handler, with a sampling of its own."""

    def _streaming(
        self, request_id: str, model: Any, processor: Any, name: str, inputs: Any, settings: Any,
        *more: Any, **named: Any,
    ) -> Any:  # fmt: skip
        own = super()._streaming  # type: ignore[misc]

        def stream(prompt: Any, each: Any) -> AsyncGenerator[str, None]:
            given = own(request_id, model, processor, name, prompt, each, *more, **named)
            return with_cached(given.body_iterator, lambda: each.result.cached_tokens)

        streams = [stream(*each) for each in self._submitted(inputs, settings)]
        events = streams[0] if len(streams) == 1 else merged_streams(streams, settings.sampling.n)
        whole = whole_stream(events, has_usage=settings.has_usage)
        return StreamingResponse(whole, media_type="text/event-stream")

    async def _non_streaming(
        self, request_id: str, model: Any, processor: Any, name: str, inputs: Any, settings: Any,
        *more: Any, **named: Any,
    ) -> Any:  # fmt: skip
        own = super()._non_streaming  # type: ignore[misc]

        async def answer(prompt: Any, each: Any) -> dict[str, Any]:
            given = await own(request_id, model, processor, name, prompt, each, *more, **named)
            body: dict[str, Any] = json.loads(given.body)
            body["usage"] |= cached(each.result.cached_tokens)
            if each.sampling.logprobs is not None:  # of thousands of tokens: others go on
                told = await asyncio.to_thread(self._told, each)
                body["choices"][0]["logprobs"] = told
            return body

        answers = (answer(*each) for each in self._submitted(inputs, settings))
        return merged(await asyncio.gather(*answers), settings.sampling.n)

    def _submitted(self, inputs: Any, settings: Any) -> list[tuple[Any, Any]]:
        """The prompt of each answer, and its settings with its request."""
        prompts, asked = self._prompts(inputs), []
        tokens = [prompt["input_ids"] for prompt in prompts]
        for at, request in enumerate(self.model_manager.replies.submit(tokens, settings)):
            own = _settings(request.sampling, request)
            own.echoes = settings.echoes
            asked.append((prompts[at // settings.sampling.n], own))
        return asked

    def _told(self, settings: Any) -> dict[str, Any]:
        """The log-probabilities of an answer that has ended."""
        tokenizer = self.model_manager.served.llm.tokenizer
        ends = self.model_manager.replies.ends_of(settings.sampling)
        return self._logprobs(placed(settings.result, tokenizer, ends, echoes=settings.echoes))

    def _prompts(self, inputs: Any) -> Sequence[Any]:
        """One."""
        return [inputs]

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

    async def _answer(self, body: Body, request_id: str) -> Any:
        """Transformers takes one text only, and counts its tokens while all others wait."""
        self._validate_request(body)
        if body.get("echo") and body["stream"]:
            raise RequestError("echo is not served in streams: leave it out, or do not stream")
        name, model, processor = self._resolve_model(body)
        settings = self._build_generation_config(body, model.generation_config)
        asked, most = _prompts_of(body), self.model_manager.served.engine.most_requests
        if (answers := len(asked) * settings.sampling.n) > most:
            raise RequestError(
                f"expected at most {most} answers (max_waiting and max_seqs), got {answers}: send "
                "fewer prompts at a time"
            )
        prompts = await asyncio.to_thread(self._encoded, asked, processor)
        replies = self.model_manager.replies
        given = request_id, model, processor, name, prompts, settings, replies
        if body["stream"]:
            return self._streaming(*given)
        return await self._non_streaming(*given)

    def _encoded(self, prompts: Sequence[str | list[int]], processor: Any) -> list[Any]:
        """Their tokens, up to the first that is too long, which all are refused for."""
        encoded, context = [], self.model_manager.served.llm.engine.sizing.context
        for each in prompts:
            encoded.append(processor(each) if isinstance(each, str) else {"input_ids": each})
            if len(encoded[-1]["input_ids"]) > context:
                break
        return encoded

    def _letters(self, body: Body) -> int:
        return max(len(each) if isinstance(each, str) else 0 for each in _prompts_of(body))

    def _has_text(self, body: Body) -> bool:
        return isinstance(_prompts_of(body)[0], str)

    def _prompts(self, inputs: Any) -> Sequence[Any]:
        """All of them."""
        prompts: Sequence[Any] = inputs
        return prompts

    def _logprobs(self, scores: Sequence[PlacedLogprobs]) -> dict[str, Any]:
        return completion_logprobs(scores, self.model_manager.served.llm.tokenizer)


def _prompts_of(body: Body) -> Sequence[str | list[int]]:
    given: Any = body["prompt"]
    is_one = isinstance(given, str) or isinstance(given[0], int)
    return [given] if is_one else given


class Responses(_Handler, ResponseHandler):  # type: ignore[misc]
    """``/v1/responses``."""

    _needed = "input"

    def _streaming(  # type: ignore[override]
        self, request_id: str, model: Any, processor: Any, name: str, body: Any, inputs: Any,
        settings: Any, *more: Any, **named: Any,
    ) -> Any:  # fmt: skip
        given: Any = super()._streaming(
            request_id, model, processor, name, body, inputs, settings, *more, **named
        )
        whole = ended_stream(given.body_iterator, lambda response: _ended(response, settings))
        return StreamingResponse(whole, media_type="text/event-stream")

    async def _non_streaming(  # type: ignore[override]
        self, request_id: str, model: Any, processor: Any, name: str, body: Any, inputs: Any,
        settings: Any, *more: Any, **named: Any,
    ) -> Any:  # fmt: skip
        given: Any = await super()._non_streaming(
            request_id, model, processor, name, body, inputs, settings, *more, **named
        )
        return JSONResponse(_ended(json.loads(given.body), settings))


def _ended(response: dict[str, Any], settings: Any) -> dict[str, Any]:
    """What stopped has no limit any more, see `Reply`."""
    is_cut = settings.max_new_tokens is not None
    return ended_response(response, is_cut=is_cut, cached_tokens=settings.result.cached_tokens)
