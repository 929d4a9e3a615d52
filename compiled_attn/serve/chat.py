"""The endpoints with choices: ``/v1/chat/completions`` and ``/v1/completions``."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import AsyncGenerator, Sequence
from typing import Any, ClassVar, TypeVar

from openai.types import Completion, CompletionChoice, CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionMessage
from openai.types.chat.chat_completion import Choice
from openai.types.completion_usage import PromptTokensDetails

from compiled_attn.engine import GenerationResult, RequestHandle
from compiled_attn.serve.context import RequestContext
from compiled_attn.serve.endpoint import Endpoint, TemplateEndpoint, finish_reason
from compiled_attn.serve.http_errors import RequestError, error_content
from compiled_attn.serve.output_parser import ToolCall
from compiled_attn.serve.requests import ChatRequest, ChoicesRequest, CompletionRequest
from compiled_attn.serve.streaming import merge_streams, to_json
from compiled_attn.serve.token_logprobs import (
    ScoredToken,
    chat_logprobs,
    completion_logprobs,
    scored_tokens,
)
from compiled_attn.text import Tokenizer
from compiled_attn.text.answer import echo_of

__all__ = ["ChatEndpoint", "CompletionEndpoint", "usage_of"]

ChoicesT = TypeVar("ChoicesT", bound=ChoicesRequest)


class _ChunkWriter:
    """Writes the chunks of one choice around a head that is serialised once."""

    def __init__(self, head: dict[str, Any], index: int, tokenizer: Tokenizer) -> None:
        self._head = f'data: {to_json(head)[:-1]},"choices":[{{"index":{index},'
        self._id, self._tokenizer = head["id"], tokenizer

    def chunk(self, fields: str) -> str:
        """A chunk of a choice with these fields, in JSON."""
        return f"{self._head}{fields}}}]}}\n\n"


class _ChatWriter(_ChunkWriter):
    _calls = 0

    def start(self) -> str:
        return self.chunk('"delta":{"role":"assistant"}')

    def text(self, text: str, scores: Sequence[ScoredToken] = ()) -> str:
        fields = f'"delta":{{"content":{to_json(text)}}}'
        if scores:
            fields += f',"logprobs":{to_json(chat_logprobs(scores, self._tokenizer))}'
        return self.chunk(fields)

    def reasoning(self, text: str) -> str:
        return self.chunk(f'"delta":{{"reasoning_content":{to_json(text)}}}')

    def tool_call(self, call: ToolCall) -> str:
        index, self._calls = self._calls, self._calls + 1
        own = {"index": index, **_tool_call(self._id, index, call)}
        return self.chunk(f'"delta":{{"tool_calls":[{to_json(own)}]}}')

    def finish(self, result: GenerationResult) -> str:
        reason = finish_reason(result, has_tool_calls=self._calls > 0)
        return self.chunk(f'"delta":{{}},"finish_reason":"{reason}"')


class _CompletionWriter(_ChunkWriter):
    def start(self) -> str:
        return ""

    def text(self, text: str, scores: Sequence[ScoredToken] = ()) -> str:
        fields = f'"text":{to_json(text)}'
        if scores:
            fields += f',"logprobs":{to_json(completion_logprobs(scores, self._tokenizer))}'
        return self.chunk(fields)

    reasoning = text

    def tool_call(self, call: ToolCall) -> str:
        raise NotImplementedError

    def finish(self, result: GenerationResult) -> str:
        return self.chunk(f'"text":"","finish_reason":"{finish_reason(result)}"')


class _ChoicesEndpoint(Endpoint[ChoicesT]):
    """An endpoint that answers each prompt with ``n`` choices."""

    _kind: ClassVar[type[ChatCompletion | Completion]]
    _objects: ClassVar[tuple[str, str]]  # of a whole response and of a chunk
    _writer: ClassVar[type[_ChatWriter | _CompletionWriter]]

    async def _stream(
        self, request: ChoicesT, handles: Sequence[RequestHandle], context: RequestContext
    ) -> AsyncGenerator[str]:
        head = self._head(request, context, self._objects[1])
        try:
            streams = [
                self._stream_answer(request, handle, self._writer(head, index, self._tokenizer))
                for index, handle in enumerate(handles)
            ]
            async for event in merge_streams(streams):
                yield event
            if request.stream_options.include_usage:
                usage = usage_of([handle.result(0) for handle in handles], request.n)
                chunk = {**head, "choices": [], "usage": usage.model_dump(exclude_none=True)}
                yield f"data: {to_json(chunk)}\n\n"
        except Exception as error:
            yield f"data: {to_json(error_content(500, str(error)))}\n\n"
        yield "data: [DONE]\n\n"

    def _respond(
        self, request: ChoicesT, results: Sequence[GenerationResult], context: RequestContext
    ) -> str:
        name = context.response_id
        whole = self._kind.model_construct(
            **self._head(request, context, self._objects[0]),
            choices=[self._whole(request, each, at, name) for at, each in enumerate(results)],
            usage=usage_of(results, request.n),
        )
        return whole.model_dump_json(exclude_none=True, warnings=False)

    def _head(self, request: ChoicesT, context: RequestContext, kind: str) -> dict[str, Any]:
        return {
            "id": context.response_id,
            "object": kind,
            "created": int(time.time()),
            "model": self._name_of(request),
        }

    def _scored(self, result: GenerationResult, *, echo: bool = False) -> list[ScoredToken]:
        ends = self._end_tokens(result.sampling)
        return scored_tokens(result, self._tokenizer, ends, echo=echo)

    @abstractmethod
    def _whole(
        self, request: ChoicesT, result: GenerationResult, index: int, response_id: str
    ) -> Any:
        """Returns a choice of a whole response."""


class ChatEndpoint(_ChoicesEndpoint[ChatRequest], TemplateEndpoint[ChatRequest]):
    """``/v1/chat/completions``."""

    request_type = ChatRequest
    id_prefix = "chatcmpl-"
    _kind = ChatCompletion
    _objects = "chat.completion", "chat.completion.chunk"
    _writer = _ChatWriter

    def _whole(
        self, request: ChatRequest, result: GenerationResult, index: int, response_id: str
    ) -> Any:
        output = self._output(request, result)
        calls: Any = [
            _tool_call(response_id, at, call) for at, call in enumerate(output.tool_calls)
        ]
        message: Any = ChatCompletionMessage.model_construct(
            role="assistant",
            content=output.text,
            tool_calls=calls or None,
            reasoning_content=output.reasoning,
        )
        logprobs: Any = None
        if result.logprobs is not None:
            logprobs = chat_logprobs(self._scored(result), self._tokenizer)
        return Choice.model_construct(
            index=index,
            message=message,
            logprobs=logprobs,
            finish_reason=finish_reason(result, has_tool_calls=bool(calls)),
        )


class CompletionEndpoint(_ChoicesEndpoint[CompletionRequest]):
    """``/v1/completions``, of one prompt or several, in text or token ids."""

    request_type = CompletionRequest
    id_prefix = "cmpl-"
    _kind = Completion
    _objects = "text_completion", "text_completion"
    _writer = _CompletionWriter

    def _tokenize(self, request: CompletionRequest) -> Sequence[list[int]]:
        """Tokenizes up to the first prompt that is too long, which is refused with all others."""
        if request.echo and request.stream:
            raise RequestError("echo is not served in streams: leave it out, or do not stream")
        prompts, most = request.prompts, self._model.engine.most_requests
        if (answers := len(prompts) * request.n) > most:
            raise RequestError(
                f"expected at most {most} answers (max_waiting and max_seqs), got {answers}: send "
                "fewer prompts at a time"
            )
        encode, encoded = self._tokenizer.of_transformers, []
        for prompt in prompts:
            tokens = encode(prompt)["input_ids"] if isinstance(prompt, str) else prompt
            if isinstance(prompt, str) and self._tokenizer.special.issuperset(tokens):
                raise RequestError("expected a prompt with text, got special tokens only")
            encoded.append(tokens)
            if len(tokens) > self._model.llm.engine.sizing.context:
                break
        return encoded

    def _whole(
        self, request: CompletionRequest, result: GenerationResult, index: int, response_id: str
    ) -> Any:
        ends = self._end_tokens(result.sampling)
        text = self._output(request, result).text
        if request.echo:
            text = echo_of(result, self._tokenizer, ends)
        logprobs: Any = None
        if result.logprobs is not None:
            scored = self._scored(result, echo=request.echo)
            logprobs = completion_logprobs(scored, self._tokenizer)
        return CompletionChoice.model_construct(
            index=index, text=text, logprobs=logprobs, finish_reason=finish_reason(result)
        )


def usage_of(results: Sequence[GenerationResult], choices: int) -> CompletionUsage:
    """Adds up the usage of ``choices`` answers to each prompt, which counts once."""
    first_choices = results[::choices]
    prompt = sum(len(result.prompt) for result in first_choices)
    own = sum(len(result.tokens) for result in results)
    cached = sum(result.cached_tokens for result in first_choices)
    return CompletionUsage(
        prompt_tokens=prompt,
        completion_tokens=own,
        total_tokens=prompt + own,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
    )


def _tool_call(response_id: str, index: int, call: ToolCall) -> dict[str, Any]:
    name = f"{response_id}_tool_call_{index}"
    return {"id": name, "type": "function", "function": call._asdict()}
