"""The endpoint ``/v1/responses``."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from openai.types.responses import (
    Response,
    ResponseError,
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseOutputText,
    ResponseReasoningItem,
)
from openai.types.responses.response import IncompleteDetails
from openai.types.responses.response_usage import (
    InputTokensDetails,
    OutputTokensDetails,
    ResponseUsage,
)
from pydantic import BaseModel

from compiled_attn.engine import GenerationResult, RequestHandle
from compiled_attn.serve.context import RequestContext
from compiled_attn.serve.endpoint import TemplateEndpoint, finish_reason
from compiled_attn.serve.output_parser import ToolCall
from compiled_attn.serve.requests import ResponseRequest
from compiled_attn.serve.streaming import to_json
from compiled_attn.serve.token_logprobs import ScoredToken

__all__ = ["ResponseEndpoint"]


class ResponseEndpoint(TemplateEndpoint[ResponseRequest]):
    """``/v1/responses``."""

    request_type = ResponseRequest
    id_prefix = "resp_"

    async def _stream(
        self, request: ResponseRequest, handles: Sequence[RequestHandle], context: RequestContext
    ) -> AsyncGenerator[str]:
        (handle,) = handles
        writer = _ResponseWriter(_Items(context, self._name_of(request), request))
        try:
            async for event in self._stream_answer(request, handle, writer):
                yield event
        except Exception as error:
            yield writer.fail(str(error))

    def _respond(
        self,
        request: ResponseRequest,
        results: Sequence[GenerationResult],
        context: RequestContext,
    ) -> str:
        (result,) = results
        output, items = (
            self._output(request, result),
            _Items(context, self._name_of(request), request),
        )
        own = [
            *([items.reasoning(output.reasoning)] if output.reasoning else []),
            items.message(output.text, _status(result)),
            *(items.tool_call(call, at) for at, call in enumerate(output.tool_calls)),
        ]
        return _dump(items.finished(own, result))


class _Items:
    """Builds the objects of one response."""

    def __init__(self, context: RequestContext, model: str, request: ResponseRequest) -> None:
        self._key = context.key
        self.message_id, self.reasoning_id = f"msg_{context.key}", f"rs_{context.key}"
        self._head: dict[str, Any] = {
            "id": context.response_id,
            "created_at": time.time(),
            "model": model,
            "object": "response",
            "tools": [],
            "parallel_tool_calls": request.parallel_tool_calls,
            "tool_choice": "auto",
        }

    def response(self, status: str, output: Sequence[Any] = (), **more: Any) -> Response:
        return Response.model_construct(**self._head, status=status, output=[*output], **more)

    def finished(self, output: Sequence[Any], result: GenerationResult) -> Response:
        """The last state: complete, or incomplete where the answer reached its limit."""
        prompt, own = len(result.prompt), len(result.tokens)
        status = _status(result)
        is_cut = status == "incomplete"
        return self.response(
            status,
            output,
            incomplete_details=IncompleteDetails(reason="max_output_tokens") if is_cut else None,
            usage=ResponseUsage.model_construct(
                input_tokens=prompt,
                output_tokens=own,
                total_tokens=prompt + own,
                input_tokens_details=InputTokensDetails.model_construct(
                    cached_tokens=result.cached_tokens, cache_write_tokens=0
                ),
                output_tokens_details=OutputTokensDetails(reasoning_tokens=0),
            ),
        )

    def reasoning(self, text: str | None, status: Any = "completed") -> ResponseReasoningItem:
        content: Any = [] if text is None else [{"type": "reasoning_text", "text": text}]
        return ResponseReasoningItem(
            id=self.reasoning_id, type="reasoning", summary=[], content=content, status=status
        )

    def message(self, text: str | None, status: Any) -> ResponseOutputMessage:
        return ResponseOutputMessage(
            id=self.message_id,
            type="message",
            role="assistant",
            content=[] if text is None else [_part(text)],
            status=status,
        )

    def tool_call(self, call: ToolCall, index: int) -> ResponseFunctionToolCall:
        name = f"{self._key}_tool_call_{index}"
        return ResponseFunctionToolCall(
            id=name, call_id=name, type="function_call", status="completed", **call._asdict()
        )


class _ResponseWriter:
    """Writes the events of one response; reasoning and text open and close items."""

    def __init__(self, items: _Items) -> None:
        self._items = items
        self._sequence = self._calls = 0
        self._output: list[Any] = []  # items that are done
        self._open = ""  # id of the item that is not
        self._parts: list[str] = []  # of its text

    def start(self) -> str:
        states = (("created", "queued"), ("in_progress", "in_progress"))
        return "".join(
            self._event(f"response.{kind}", response=_dump(self._items.response(status)))
            for kind, status in states
        )

    def text(self, text: str, scores: Sequence[ScoredToken] = ()) -> str:
        start = self._begin(self._items.message_id)
        return start + self._delta("response.output_text.delta", text, ',"logprobs":[]')

    def reasoning(self, text: str) -> str:
        start = self._begin(self._items.reasoning_id)
        return start + self._delta("response.reasoning_text.delta", text)

    def tool_call(self, call: ToolCall) -> str:
        events, item = self._end(), self._items.tool_call(call, self._calls)
        self._calls += 1
        events += self._item("added", item)
        events += self._event(
            "response.function_call_arguments.done",
            item_id=to_json(item.id),
            output_index=len(self._output),
            arguments=to_json(item.arguments),
            name=to_json(item.name),
        )
        return events + self._item("done", item)

    def finish(self, result: GenerationResult) -> str:
        is_message = self._open == self._items.message_id
        end = self._end(_status(result) if is_message else "completed")
        if not any(isinstance(item, ResponseOutputMessage) for item in self._output):
            end += self._begin(self._items.message_id) + self._end(_status(result))
        response = self._items.finished(self._output, result)
        return end + self._event(f"response.{response.status}", response=_dump(response))

    def fail(self, message: str) -> str:
        error = ResponseError(code="server_error", message=message)
        response = self._items.response("failed", error=error)
        event = self._event("error", message=to_json(message))
        return event + self._event("response.failed", response=_dump(response))

    def _begin(self, item_id: str) -> str:
        """Opens the item of a text or of reasoning, unless it is open."""
        if self._open == item_id:
            return ""
        end, self._open, self._parts = self._end(), item_id, []
        if item_id == self._items.reasoning_id:
            return end + self._item("added", self._items.reasoning(None, "in_progress"))
        added = self._item("added", self._items.message(None, "in_progress"))
        return end + added + self._content("response.content_part.added", part=_dump(_part("")))

    def _end(self, status: str = "completed") -> str:
        """Closes the open item, if there is one."""
        if not self._open:
            return ""
        text = "".join(self._parts)
        if self._open == self._items.reasoning_id:
            item: Any = self._items.reasoning(text)
            done = self._content("response.reasoning_text.done", text=to_json(text))
        else:
            item = self._items.message(text, status)
            part = _dump(_part(text))
            done = self._content("response.output_text.done", text=to_json(text), logprobs="[]")
            done += self._content("response.content_part.done", part=part)
        self._open = ""
        return done + self._item("done", item)

    def _delta(self, kind: str, text: str, more: str = "") -> str:
        self._parts.append(text)
        return self._content(kind, delta=to_json(text) + more)

    def _content(self, kind: str, **fields: str) -> str:
        own = {"item_id": to_json(self._open), "output_index": len(self._output)}
        return self._event(kind, **own, content_index=0, **fields)

    def _item(self, change: str, item: BaseModel) -> str:
        kind, index = f"response.output_item.{change}", len(self._output)
        if change == "done":
            self._output.append(item)
        return self._event(kind, output_index=index, item=_dump(item))

    def _event(self, kind: str, **fields: Any) -> str:
        """An event; the values of its fields are JSON."""
        sequence, self._sequence = self._sequence, self._sequence + 1
        own = "".join([f',"{name}":{value}' for name, value in fields.items()])
        return f'data: {{"type":"{kind}","sequence_number":{sequence}{own}}}\n\n'


def _status(result: GenerationResult) -> str:
    return "incomplete" if finish_reason(result) == "length" else "completed"


def _part(text: str) -> ResponseOutputText:
    return ResponseOutputText(type="output_text", text=text, annotations=[])


def _dump(value: BaseModel) -> str:
    return value.model_dump_json(exclude_none=True, warnings=False)
