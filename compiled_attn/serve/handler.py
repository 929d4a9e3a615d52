"""Shared part of all request handlers: parsing, checks, templates, sampling, submission."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from transformers import GenerationConfig
from transformers.cli.serving.utils import Modality, get_response_template

from compiled_attn.engine import RequestHandle, SamplingParams
from compiled_attn.serve.body import (
    EXTENSIONS,
    Body,
    check_body,
    check_unicode,
    count_characters,
    grammar_of,
    sampling_of,
    without_nulls,
)
from compiled_attn.serve.call import current_call
from compiled_attn.serve.errors import RequestError
from compiled_attn.serve.parse import offload, parse_body
from compiled_attn.serve.replies import Replies
from compiled_attn.serve.served import Served
from compiled_attn.text import LLM
from graphs.errors import clipped

__all__ = ["Handler", "OneModel"]

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


class Handler:
    """What is our own of each handler: checks, the model, the sampling."""

    _unused_fields: ClassVar[set[str]] = set()
    _needed: ClassVar[str]
    _parses: ClassVar[bool] = True
    model_manager: OneModel

    async def handle_raw(self, raw: bytes, request_id: str) -> Any:
        """The answer to a request whose body is not parsed yet.

        Parsing, checks, templates and tokenization run in worker threads, and end early when the
        client goes.

        Raises:
            RequestError: it cannot be served.
        """
        call = current_call()
        assert self.model_manager.served.llm is not None  # or it raises: not before it is warm
        try:
            body = await call.unless_gone(offload(len(raw), self._parsed, raw))
            await self._compile_grammar(body)
            tools = self._template_tools(body)
            prompts = await call.unless_gone(offload(len(raw), self._prompts, body, tools))
            name, model, processor = self._resolve_model(body)
            settings = self._build_generation_config(body, model.generation_config)
            asked = await offload(len(raw), self._submitted, prompts, settings)
        except ValueError as error:
            raise RequestError(str(error)) from error
        except RecursionError as error:
            raise RequestError(
                "expected a body of few levels, got one that is nested too deep: flatten it"
            ) from error
        given = (request_id, model, processor, name, *self._echoed(body), asked, settings)
        replies = self.model_manager.replies
        if body["stream"]:
            return self._streaming(*given, gen_manager=replies, **tools)  # type: ignore[attr-defined]
        return await self._non_streaming(*given, gen_manager=replies, **tools)  # type: ignore[attr-defined]

    def _parsed(self, raw: bytes) -> dict[str, Any]:
        """The body of a request, checked as far as that needs no tokens."""
        body = without_nulls(parse_body(raw))
        served = self.model_manager.served
        if b"\\u" in raw:
            check_unicode(body)
        self._refuse_endless(body)
        check_body(body, self._needed)
        self._validate_request(body)
        self._resolve_model(body)
        self._refuse_unseen(body)
        body.setdefault("stream", False)
        sampling_of(body, served.llm.model.generation_config)
        return body

    def _template_tools(self, body: Body) -> dict[str, Any]:
        """The argument ``tools`` of a template and of the parser of an answer."""
        return {"tools": body.get("tools")}

    def _messages(self, body: Body) -> list[dict[str, Any]]:
        """The messages of a request."""
        messages: list[dict[str, Any]] = body["messages"]
        return messages

    def _prompts(self, body: Body, tools: dict[str, Any]) -> Sequence[Any]:
        """Renders and tokenizes the one prompt of a chat."""
        name, _, processor = self._resolve_model(body)
        try:
            messages = self.get_processor_inputs_from_messages(  # type: ignore[attr-defined]
                self._messages(body), Modality.LLM
            )
            inputs = processor.apply_chat_template(
                messages,
                add_generation_prompt=True,
                return_dict=True,
                tokenize=True,
                **tools,
                **body.get("chat_template_kwargs", {}),
            )
        except Exception as error:  # a template is a program of the model's
            reason = clipped(" ".join(f"{type(error).__name__}: {error}".split()), 300)
            raise RequestError(
                f"expected messages, tools and chat_template_kwargs that the chat template of "
                f"{name} takes, got {reason}: change them"
            ) from error
        return [inputs]

    def _submitted(self, prompts: Sequence[Any], settings: Any) -> list[tuple[Any, Any]]:
        """The prompt of each answer, and its settings with its request."""
        asked = []
        tokens = [prompt["input_ids"] for prompt in prompts]
        for at, request in enumerate(self.model_manager.replies.submit(tokens, settings)):
            own = settings_for(request.sampling, request)
            own.echoes = settings.echoes
            asked.append((prompts[at // settings.sampling.n], own))
        return asked

    def _echoed(self, body: Body) -> tuple[Any, ...]:
        """What the handler of transformers wants of the body."""
        return ()

    def _refuse_unseen(self, body: Body) -> None:
        """Refuses tools that the model would not be told of."""
        template = self.model_manager.served.llm.tokenizer.of_transformers.chat_template
        if body.get("tools") and "tools" not in str(template):
            raise RequestError(
                f"tools are not served: the chat template of {self.model_manager.served.name} does "
                "not show them to the model: leave them out, or serve a model that calls tools"
            )

    def _refuse_endless(self, body: Body) -> None:
        """Refuses what no tokens of the context can spell, before it is validated or tokenized."""
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
        return count_characters(asked)

    async def _compile_grammar(self, body: Body) -> None:
        """Compiles what the format asks for, which may take seconds, while others go on."""
        if (grammar := grammar_of(body)) is None:
            return
        served, call = self.model_manager.served, current_call()
        compiled = served.llm.grammars.known(grammar)
        if compiled is None:
            compiled = await call.unless_gone(served.grammars.compiled(grammar, call.client))
        call.held.append(compiled)  # or others could push it out of the cache before it is used

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
        settings = settings_for(sampling)
        settings.is_limited, settings.has_text = is_limited, self._has_text(body)
        settings.echoes = body.get("echo", False)
        settings.has_usage = body.get("stream_options", {}).get("include_usage", False)
        return settings

    def _has_text(self, body: Body) -> bool:
        """Whether its prompt is text, which special tokens alone are not."""
        return True


def settings_for(sampling: SamplingParams, request: RequestHandle | None = None) -> Any:
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
