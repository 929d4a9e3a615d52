"""Responses that have ended: what transformers does not tell of them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

__all__ = ["ended_response", "ended_stream"]

_LAST = '"type":"response.completed"'  # in a text that is JSON its quotation marks have backslashes


def ended_response(response: dict[str, Any], *, is_cut: bool, cached_tokens: int) -> dict[str, Any]:
    """The same with its cached tokens; incomplete, as the protocol calls it, where it was cut.

    Args:
        response: as a body or in the last event of its stream.
        is_cut: whether it reached its limit of tokens.
        cached_tokens: of its prompt.
    """
    response["usage"]["input_tokens_details"]["cached_tokens"] = cached_tokens
    if not is_cut:
        return response
    for item in response["output"]:
        if item["type"] == "message":
            item["status"] = "incomplete"
    reason = {"reason": "max_output_tokens"}
    return {**response, "status": "incomplete", "incomplete_details": reason}


async def ended_stream(
    events: AsyncGenerator[str, None], ended: Callable[[dict[str, Any]], dict[str, Any]]
) -> AsyncIterator[str]:
    """A stream whose last event has the response as it ended.

    Args:
        events: of a response.
        ended: what becomes of it; called with the last of them.
    """
    async with contextlib.aclosing(events):
        async for event in events:
            if _LAST in event:
                told = json.loads(event.removeprefix("data: "))
                response = ended(told["response"])
                kind = f"response.{response['status']}"
                event = f"data: {json.dumps({**told, 'type': kind, 'response': response})}\n\n"
            yield event
