"""Typed requests of the OpenAI protocol: served fields, and the sampling that they ask for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, TypeAlias

from annotated_types import Ge, Le, MaxLen
from openai.types.chat.completion_create_params import CompletionCreateParamsStreaming as ChatFields
from openai.types.completion_create_params import CompletionCreateParamsStreaming as TextFields
from openai.types.responses.response_create_params import ResponseCreateParamsStreaming
from pydantic import AfterValidator, Field, ValidationError

from compiled_attn.engine import Grammar, SamplingParams
from compiled_attn.serve.http_errors import RequestError
from compiled_attn.serve.parse import count_characters
from compiled_attn.serve.request_parts import (
    ChatMessage,
    FunctionCall,
    FunctionOutput,
    Many,
    Object,
    Part,
    PlainFormat,
    SchemaFormat,
    StreamOptions,
    Text,
    TextSettings,
    Tokens,
    check_tool,
    grammar_of,
    messages_of,
)
from compiled_attn.text.plain_tokenizer import TEMPLATE_ARGUMENTS
from graphs.errors import clipped, quoted

if TYPE_CHECKING:
    from transformers import GenerationConfig

__all__ = [
    "Body",
    "ChatRequest",
    "CompletionRequest",
    "GenerationRequest",
    "ResponseRequest",
    "TemplateRequest",
]

Body = Mapping[str, Any]

_DEFAULT_TOKENS = 1024  # of a request without a limit
_MAX_CHOICES, _MAX_TOP_LOGPROBS = 128, 20  # as OpenAI documents them
_MAX_STOPS, _MAX_STOP = 16, 256  # each token of an answer is compared with all of them
_Stop: TypeAlias = Annotated[str, MaxLen(_MAX_STOP)]
_Stops = Field(max_length=_MAX_STOPS, fail_fast=True)
_SERVED_VALUES: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "reasoning_effort": (),
    "reasoning": ({},),
    "verbosity": (),
    "tool_choice": ("auto",),
    "functions": (),
    "function_call": (),
    "generation_config": (),
    "previous_response_id": (),
    "background": (False,),
    "suffix": (),
    "include": ([],),
    "truncation": ("disabled",),
}
"""Fields that would change the answer, and the only values that are served."""
_SAMPLING_FIELDS = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos"),
    *("seed", "presence_penalty", "frequency_penalty", "logit_bias"),
)


def _field(default: Any, expected: str) -> Any:
    """A field; errors say what was expected."""
    return Field(default, description=expected)


def _keys(params: Any) -> frozenset[str]:
    return frozenset(params.__required_keys__ | params.__optional_keys__)


def _check_variables(variables: dict[str, Any]) -> dict[str, Any]:
    if TEMPLATE_ARGUMENTS & variables.keys():
        raise ValueError("an argument of the tokenizer, such as another template")
    return variables


def _token_biases(biases: dict[str, float]) -> dict[int, float]:
    by_token = {int(token): bias for token, bias in biases.items()}
    if [*map(str, by_token)] != [*biases]:
        raise ValueError("another spelling of an integer")
    return by_token


class GenerationRequest(Object):
    """Fields of all endpoints; further fields of the protocol are ignored."""

    prompt_field: ClassVar[str]
    limit_fields: ClassVar[tuple[str, ...]] = ("max_tokens",)
    openai_fields: ClassVar[frozenset[str]]
    served_values: ClassVar[dict[str, tuple[Any, ...]]] = _SERVED_VALUES

    model: Any = None
    stream: bool = _field(False, "true or false")
    temperature: float | None = _field(None, "a number")
    top_p: float | None = _field(None, "a number")
    seed: int | None = _field(None, "an integer")
    # Beyond the protocol, as vLLM names them: `extra_body` of the client.
    top_k: int | None = _field(None, "an integer")
    min_p: float | None = _field(None, "a number")
    repetition_penalty: float | None = _field(None, "a number")
    min_tokens: int | None = _field(None, "an integer")
    ignore_eos: bool | None = _field(None, "true or false")
    response_format: PlainFormat | SchemaFormat | None = _field(
        None, "of type text, json_object, or json_schema with a schema in json_schema"
    )

    @classmethod
    def parse(cls, body: Body) -> Self:
        """Validates a body without nulls.

        Raises:
            RequestError: a field has another type, is unknown, or has a value that is not served.
        """
        for name, values in cls.served_values.items():
            if name in body and body[name] not in values:
                allowed = " or ".join(map(repr, values))
                remedy = f"send {allowed}, or leave it out" if values else "leave it out"
                raise RequestError(f"{name} is not served, got {quoted(body[name])}: {remedy}")
        known = cls.openai_fields | cls.model_fields.keys()
        if unknown := sorted(body.keys() - known):
            got = clipped(", ".join(unknown), 300)
            raise RequestError(f"expected fields of the protocol, got {got}")
        try:
            return cls.model_validate(body)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            name = str(first["loc"][0])
            expected = cls.model_fields[name].description
            raise RequestError(
                f"expected {name}: {expected}, got {quoted(body.get(name))}"
            ) from error

    @classmethod
    def count_prompt_characters(cls, body: Body) -> int:
        """Characters of the longest prompt, before the body is validated."""
        names = (cls.prompt_field, "instructions", "tools", "chat_template_kwargs")
        return count_characters([body[name] for name in names if name in body])

    @property
    def token_limit(self) -> int | None:
        """The limit of generated tokens that the request sets."""
        limits = (getattr(self, name) for name in self.limit_fields)
        return next((limit for limit in limits if limit is not None), None)

    def grammar(self) -> Grammar | None:
        """The grammar of the requested format; None allows any text.

        Raises:
            RequestError: the JSON schema is invalid.
        """
        return grammar_of(self.response_format)

    def sampling(self, default: GenerationConfig) -> SamplingParams:
        """The sampling parameters; fields that are missing have the model's defaults.

        Raises:
            RequestError: a value that `SamplingParams` refuses.
        """
        values: dict[str, Any] = {}
        if default.do_sample:
            advised = {"top_p": default.top_p, "top_k": default.top_k}
            values = {name: value for name, value in advised.items() if value is not None}
            values["temperature"] = default.temperature or 1.0
        set_fields = self.model_fields_set
        values |= {name: getattr(self, name) for name in _SAMPLING_FIELDS if name in set_fields}
        limit = self.token_limit
        values["max_new_tokens"] = _DEFAULT_TOKENS if limit is None else limit
        values["grammar"] = self.grammar()
        try:
            return SamplingParams(**values, **self._choice_settings())
        except (TypeError, ValueError) as error:
            raise RequestError(str(error)) from error

    def _choice_settings(self) -> dict[str, Any]:
        return {}


class ChoicesRequest(GenerationRequest):
    """Fields of chats and completions, which answer with choices."""

    max_tokens: int | None = _field(None, "an integer")
    n: Annotated[int, Ge(1), Le(_MAX_CHOICES)] = _field(1, f"an integer in 1..{_MAX_CHOICES}")
    stop: _Stop | Annotated[list[_Stop], _Stops] | None = _field(
        None, f"a text or a list of up to {_MAX_STOPS} texts, of up to {_MAX_STOP} letters each"
    )
    logprobs: bool | Annotated[int, Ge(0), Le(_MAX_TOP_LOGPROBS)] = _field(
        False, f"true, false, or an integer in 0..{_MAX_TOP_LOGPROBS}"
    )
    top_logprobs: Annotated[int, Ge(0), Le(_MAX_TOP_LOGPROBS)] = _field(
        0, f"an integer in 0..{_MAX_TOP_LOGPROBS}"
    )
    presence_penalty: float | None = _field(None, "a number")
    frequency_penalty: float | None = _field(None, "a number")
    logit_bias: Annotated[dict[str, float], AfterValidator(_token_biases)] | None = _field(
        None, "token ids with numbers"
    )
    stream_options: StreamOptions = _field(
        StreamOptions(), "an object whose include_usage is true or false"
    )

    def _choice_settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = {"n": self.n, "logprobs": self._logprobs()}
        if self.stop:
            settings["stop"] = (self.stop,) if isinstance(self.stop, str) else self.stop
        return settings

    def _logprobs(self) -> int | None:
        """Chats have a switch and a count, completions one count."""
        if not isinstance(self.logprobs, bool):
            return self.logprobs
        if self.top_logprobs and not self.logprobs:
            raise RequestError(
                f"expected logprobs: true with top_logprobs, got {self.top_logprobs} without it"
            )
        return self.top_logprobs if self.logprobs else None


class TemplateRequest(GenerationRequest):
    """Fields of chats and responses, whose prompt is rendered by the model's chat template."""

    tools: list[Annotated[dict[str, Any], AfterValidator(check_tool)]] | None = _field(
        None, "a list of functions"
    )
    parallel_tool_calls: bool = _field(False, "true or false")
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(_check_variables)] = _field(
        {}, "variables of the model's template"
    )

    def template_messages(self) -> list[dict[str, Any]]:
        """The messages as chat templates read them."""
        raise NotImplementedError

    def template_tools(self) -> list[dict[str, Any]] | None:
        """The tools as chat templates read them: each function nested in an object."""
        return self.tools


class ChatRequest(ChoicesRequest, TemplateRequest):
    """``/v1/chat/completions``."""

    prompt_field: ClassVar[str] = "messages"
    limit_fields: ClassVar[tuple[str, ...]] = ("max_completion_tokens", "max_tokens")
    openai_fields: ClassVar[frozenset[str]] = _keys(ChatFields)

    messages: Annotated[list[ChatMessage], Many] = _field(
        ..., "a list of messages, each of a role and a content of text"
    )
    max_completion_tokens: int | None = _field(None, "an integer")

    def template_messages(self) -> list[dict[str, Any]]:
        """The messages as chat templates read them."""
        return [message.for_template() for message in self.messages]


class CompletionRequest(ChoicesRequest):
    """``/v1/completions``, of one prompt or several, in text or token ids."""

    prompt_field: ClassVar[str] = "prompt"
    openai_fields: ClassVar[frozenset[str]] = _keys(TextFields)

    prompt: Text | Tokens | Annotated[list[Text], Many] | Annotated[list[Tokens], Many] = _field(
        ..., "a text, token ids, or a list of either"
    )

    echo: bool = _field(False, "true or false")

    def _choice_settings(self) -> dict[str, Any]:
        settings = super()._choice_settings()
        return {**settings, "prompt_logprobs": settings["logprobs"]} if self.echo else settings

    @classmethod
    def count_prompt_characters(cls, body: Body) -> int:
        """Characters of the longest prompt; token ids have none."""
        given = body.get("prompt")
        prompts = given if isinstance(given, list) else [given]
        return max((len(each) for each in prompts if isinstance(each, str)), default=0)

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """All prompts, each a text or token ids."""
        prompt: Any = self.prompt
        is_one = isinstance(prompt, str) or isinstance(prompt[0], int)
        return [prompt] if is_one else prompt


class ResponseRequest(TemplateRequest):
    """``/v1/responses``."""

    prompt_field: ClassVar[str] = "input"
    limit_fields: ClassVar[tuple[str, ...]] = ("max_output_tokens",)
    openai_fields: ClassVar[frozenset[str]] = _keys(ResponseCreateParamsStreaming)
    served_values: ClassVar[dict[str, tuple[Any, ...]]] = _SERVED_VALUES | {"top_logprobs": (0,)}

    input: (
        Text
        | Annotated[list[Part], Many]
        | Annotated[list[ChatMessage | FunctionCall | FunctionOutput], Many]
    ) = _field(..., "a text or a list of messages")
    instructions: str | None = _field(None, "a text")
    max_output_tokens: int | None = _field(None, "an integer")
    text: TextSettings = _field(
        TextSettings(),
        "a format of type text, json_object, or json_schema with a schema, and nothing else",
    )

    def grammar(self) -> Grammar | None:
        """The grammar of ``response_format`` or ``text.format``."""
        return grammar_of(self.response_format or self.text.format)

    def template_messages(self) -> list[dict[str, Any]]:
        """Input and instructions as chat messages."""
        given: Any = self.input
        if isinstance(given, str) or isinstance(given[0], Part):
            text = given if isinstance(given, str) else " ".join(part.text for part in given)
            messages = [{"role": "user", "content": text}]
        else:
            messages = messages_of(given)
        if self.instructions:
            if messages[0]["role"] == "system":
                messages.pop(0)
            messages.insert(0, {"role": "system", "content": self.instructions})
        return messages

    def template_tools(self) -> list[dict[str, Any]] | None:
        """The flat functions of this endpoint, nested as in chats."""
        return self.tools and [
            tool if "function" in tool else {"type": "function", "function": _without_type(tool)}
            for tool in self.tools
        ]


def _without_type(tool: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in tool.items() if name != "type"}
