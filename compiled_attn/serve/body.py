"""The body of a request: what is refused before it is read, and the sampling that it asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import GenerationConfig

from compiled_attn.engine import SamplingParams
from compiled_attn.serve.errors import RequestError
from graphs.errors import quoted

__all__ = ["EXTENSIONS", "check_chat", "check_completion", "check_response", "sampling_of"]

Body = Mapping[str, Any]

EXTENSIONS = frozenset({"top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos"})
"""Fields beyond the protocol, as vLLM names them: ``extra_body`` of the client."""

_SAME = (*EXTENSIONS, "temperature", "top_p", "seed", "presence_penalty", "frequency_penalty")
_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
_ONLY: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "echo": (None, False),
    "logprobs": (None, False, 0),
    "response_format": (None, {"type": "text"}),
    "previous_response_id": (None,),
    "background": (None, False),
    "suffix": (None,),
}
"""What would change the answer, and is served with these values only."""


def check_chat(body: Body) -> None:
    """Raises RequestError for a chat completion that has no messages of text, or asks for more."""
    _check_fields(body)
    _check_messages("messages", body.get("messages"))


def check_completion(body: Body) -> None:
    """Raises RequestError for a completion without a prompt of text, or that asks for more."""
    _check_fields(body)
    if not isinstance(body.get("prompt"), str) or not body["prompt"]:
        raise RequestError(f"expected prompt: a text, got {quoted(body.get('prompt'))}")


def check_response(body: Body) -> None:
    """Raises RequestError for a response without input, or that asks for more."""
    _check_fields(body)
    asked = body.get("input")
    if isinstance(asked, list) and any("role" in each for each in asked if isinstance(each, dict)):
        _check_messages("input", asked)
    elif not asked or not isinstance(asked, (str, list)):
        raise RequestError(f"expected input: a text or messages, got {quoted(asked)}")


def sampling_of(body: Body, default: GenerationConfig) -> tuple[SamplingParams, bool]:
    """The sampling of a request, and whether it says how many tokens it wants.

    Args:
        body: of the request.
        default: what the model's makers advise where the request says nothing.

    Raises:
        RequestError: a value that `SamplingParams` refuses.
    """
    advised = {"temperature": 1.0, "top_p": default.top_p, "top_k": default.top_k}
    advised["temperature"] = default.temperature or 1.0
    wanted = {name: x for name, x in advised.items() if x is not None and default.do_sample}
    wanted |= {name: body[name] for name in _SAME if body.get(name) is not None}
    if body.get("stop"):
        stop = body["stop"]
        wanted["stop"] = (stop,) if isinstance(stop, str) else stop
    if body.get("logit_bias"):
        wanted["logit_bias"] = _bias(body["logit_bias"])
    limit = next((body[name] for name in _LIMITS if body.get(name) is not None), None)
    if limit is not None:
        wanted["max_new_tokens"] = limit
    try:
        return SamplingParams(**wanted), limit is not None
    except (TypeError, ValueError) as error:
        raise RequestError(str(error)) from error


def _bias(given: object) -> dict[int, float]:
    try:
        return {int(token): bias for token, bias in given.items()}  # type: ignore[attr-defined]
    except (AttributeError, TypeError, ValueError) as error:
        raise RequestError(
            f"expected logit_bias: token ids with numbers, got {quoted(given)}"
        ) from error


def _check_fields(body: Body) -> None:
    for name, served in _ONLY.items():
        if body.get(name) not in served:
            values = " or ".join(repr(each) for each in served if each is not None)
            instead = f"send {values}, or leave it out" if values else "leave it out"
            raise RequestError(f"{name} is not served, got {quoted(body[name])}: {instead}")


def _check_messages(name: str, messages: object) -> None:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise RequestError(f"expected {name}: a list of messages, got {quoted(messages)}")
    for message in messages:
        if not _is_message(message):
            raise RequestError(
                f"expected messages of a role and a content of text, got {quoted(message)}"
            )


def _is_message(message: object) -> bool:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return False
    content = message.get("content")
    if isinstance(content, list):
        return all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content)
    return isinstance(content, str) or "tool_calls" in message
