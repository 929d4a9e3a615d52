"""Responses that reached their limit of tokens: the protocol calls them incomplete."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

__all__ = ["cut_response", "cut_stream"]

_LAST = '"type":"response.completed"'  # in a text that is JSON its quotation marks have backslashes


def cut_response(response: dict[str, Any]) -> dict[str, Any]:
    """The same, said to be cut: a response as a body or in the last event of its stream."""
    messages = [item for item in response["output"] if item["type"] == "message"]
    for message in messages:
        message["status"] = "incomplete"
    reason = {"reason": "max_output_tokens"}
    return {**response, "status": "incomplete", "incomplete_details": reason}


async def cut_stream(
    events: AsyncGenerator[str, None], is_cut: Callable[[], bool]
) -> AsyncIterator[str]:
    """A stream whose last event says whether the response is complete.

    Args:
        events: of a response.
        is_cut: whether it reached its limit; asked with the last of them.
    """
    async with contextlib.aclosing(events):
        async for event in events:
            if _LAST in event and is_cut():
                told = json.loads(event.removeprefix("data: "))
                told |= {"type": "response.incomplete", "response": cut_response(told["response"])}
                yield f"data: {json.dumps(told)}\n\n"
            else:
                yield event
