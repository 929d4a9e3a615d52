"""The handlers of transformers for one served model, each request with a sampling of its own."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

from jinja2 import TemplateError
from transformers import GenerationConfig
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.utils import Modality, get_response_template

from compiled_attn.serve.body import (
    EXTENSIONS,
    Body,
    check_body,
    grammar_of,
    sampling_of,
    without_nulls,
)
from compiled_attn.serve.errors import RequestError
from compiled_attn.serve.replies import Replies
from compiled_attn.serve.served import Served
from compiled_attn.text import LLM

__all__ = ["Chats", "Completions", "OneModel", "Responses"]


class OneModel:
    """What the handlers take for a manager of models and of their generation: there is one.

    Args:
        served: the model.
    """

    force_model = None

    def __init__(self, served: Served) -> None:
        self.served = served
        self._replies = Replies(served)

    def use_continuous_batching(self, model: Any, modality: Any) -> bool:
        """Always."""
        return True

    def get_manager(self, model_id: str, use_cb: bool = False) -> Replies:
        """The one there is."""
        return self._replies

    def get_model_modality(self, model: Any, processor: Any = None) -> Modality:
        """Text."""
        return Modality.LLM

    def get_gen_models(self) -> list[dict[str, Any]]:
        """The model as the protocol lists it."""
        return [
            {"id": self.served.name, "object": "model", "created": 0, "owned_by": "compiled-attn"}
        ]

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
        body = without_nulls(body)
        check_body(body, self._needed)
        body.setdefault("stream", False)
        try:
            if (grammar := grammar_of(body)) is not None:  # it may take seconds: others go on
                await asyncio.to_thread(self.model_manager.served.llm.grammars.compiled, grammar)
            return await super().handle_request(body, request_id)  # type: ignore[misc]
        except (TemplateError, ValueError) as error:
            raise RequestError(str(error)) from error

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
        if sampling.stop and self._parses:
            _refuse_stop(llm)
        settings: Any = GenerationConfig(max_new_tokens=sampling.max_new_tokens)
        settings.sampling, settings.is_limited = sampling, is_limited
        return settings


def _refuse_stop(llm: LLM) -> None:
    """A parser reads tokens, and would show what a stop string hides."""
    if get_response_template(llm.tokenizer.of_transformers, llm.model) is not None:
        raise RequestError(
            "stop is not served in chats of a model whose answers are parsed for tool calls and "
            "thoughts: leave it out, or take /v1/completions"
        )


class Chats(_Handler, ChatCompletionHandler):  # type: ignore[misc]
    """``/v1/chat/completions``."""

    _needed = "messages"


class Completions(_Handler, CompletionHandler):  # type: ignore[misc]
    """``/v1/completions``."""

    _needed = "prompt"
    _parses = False


class Responses(_Handler, ResponseHandler):  # type: ignore[misc]
    """``/v1/responses``."""

    _needed = "input"
