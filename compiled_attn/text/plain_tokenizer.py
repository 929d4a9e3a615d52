"""The Rust tokenizer of a model with its chat template, without transformers, which takes seconds.

`PlainTokenizer` has what `Tokenizer` and the server use of a tokenizer of transformers, and returns
the same token ids.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from compiled_attn.errors import ModelError
from graphs.files import read_json
from graphs.installation import install_command

__all__ = ["TEMPLATE_ARGUMENTS", "Encoding", "PlainTokenizer"]

TEMPLATE_ARGUMENTS = frozenset(
    {
        "self", "conversation", "tools", "documents", "chat_template", "add_generation_prompt",
        "continue_final_message", "tokenize", "sanitize_control_tokens", "padding", "truncation",
        "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask",
        "tokenizer_kwargs", "kwargs",
    }
)  # fmt: skip
"""Parameters of ``apply_chat_template`` of transformers, which no template takes as a variable."""

_REASONING = "reasoning_content", "thinking", "reasoning"
_VOCABULARY, _FACTS = "tokenizer.json", "tokenizer_facts.json"
_OVERRIDES = "__call__", "_encode_plus", "apply_chat_template", "decode", "_decode"


class Encoding(dict[str, list[int]]):
    """Token ids of a text, as ``input_ids``."""

    @property
    def input_ids(self) -> list[int]:
        """The ids."""
        return self["input_ids"]


@dataclasses.dataclass(frozen=True)
class PlainTokenizer:
    """A tokenizer that Rust implements alone.

    Attributes:
        backend: a ``tokenizers.Tokenizer``.
        chat_template: a Jinja template, several by name, or None.
        special_tokens_map: special tokens by their role, which templates may use.
        all_special_ids: ids of special tokens.
        added_tokens_decoder: added tokens by id, each with ``content`` and ``special``.
        response_template: how answers are parsed, or None.
        name_or_path: its name.
    """

    backend: Any
    chat_template: str | dict[str, str] | None
    special_tokens_map: Mapping[str, str | list[str]]
    all_special_ids: Sequence[int]
    response_template: Any
    name_or_path: str

    @staticmethod
    def write(tokenizer: Any, folder: Path) -> None:
        """Writes a tokenizer of transformers to a folder, for `read`.

        Raises:
            ModelError: Python code of transformers takes part in its encoding or decoding.
        """
        from transformers import PreTrainedTokenizerFast as Fast

        own = type(tokenizer)
        if not isinstance(tokenizer, Fast) or any(
            getattr(own, name) is not getattr(Fast, name) for name in _OVERRIDES
        ):
            raise ModelError(
                f"expected a tokenizer that is Rust alone, got a {own.__name__}, which has Python "
                "code of its own: serve this model without a bundle"
            )
        facts = {
            "chat_template": tokenizer.chat_template,
            "special_tokens_map": {
                role: each if isinstance(each, list) else str(each)
                for role, each in tokenizer.special_tokens_map.items()
            },
            "all_special_ids": [*tokenizer.all_special_ids],
            "response_template": getattr(tokenizer, "response_template", None),
            "name_or_path": str(tokenizer.name_or_path),
        }
        (folder / _VOCABULARY).write_text(tokenizer.backend_tokenizer.to_str(), "utf-8")
        (folder / _FACTS).write_text(json.dumps(facts), "utf-8")

    @classmethod
    def read(cls, folder: Path) -> PlainTokenizer:
        """Reads what `write` has written.

        Raises:
            ModelError: the package tokenizers is not installed, or a file is missing or damaged.
        """
        try:
            from tokenizers import Tokenizer as Backend
        except ImportError as error:
            raise ModelError(
                f"a tokenizer needs tokenizers, not installed: {install_command('hf')}"
            ) from error
        try:
            backend = Backend.from_file(str(folder / _VOCABULARY))
            backend.no_truncation()
            backend.no_padding()
            return cls(backend, **read_json(folder / _FACTS))
        except Exception as error:  # that of Rust has no class of its own
            raise ModelError(
                f"bundle {folder}: expected a tokenizer, got none ({error}): make it again"
            ) from error

    @functools.cached_property
    def added_tokens_decoder(self) -> dict[int, Any]:
        """Added tokens by id."""
        found: dict[int, Any] = self.backend.get_added_tokens_decoder()
        return found

    def __call__(self, text: str, add_special_tokens: bool = True) -> Encoding:
        """Encodes a text."""
        encoded = self.backend.encode(text, add_special_tokens=add_special_tokens)
        return Encoding(input_ids=encoded.ids)

    def get_vocab(self) -> dict[str, int]:
        """Ids by token, added ones included."""
        vocabulary: dict[str, int] = self.backend.get_vocab(with_added_tokens=True)
        return vocabulary

    def convert_ids_to_tokens(self, token: int) -> str:
        """Returns the token of an id."""
        found: str = self.backend.id_to_token(token)
        return found

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        return_dict: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> Any:
        """Renders a chat: a text, or its `Encoding` with ``tokenize`` and ``return_dict``.

        Raises:
            ValueError: there is no template, or no message.
            jinja2.TemplateError: the template refuses the messages.
        """
        if not messages:
            raise ValueError("expected at least one message, got none: add one")
        text: str = _compiled(self._template(has_tools=tools is not None)).render(
            messages=[_plain_message(each) for each in messages],
            tools=tools,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **{**self.special_tokens_map, **variables},
        )
        if not tokenize:
            return text
        encoding = self(text, add_special_tokens=False)
        return encoding if return_dict else encoding.input_ids

    def to_transformers(self) -> Any:
        """Returns a tokenizer of transformers with the same tokens, for other libraries."""
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast(tokenizer_object=self.backend, **self.special_tokens_map)

    def _template(self, *, has_tools: bool) -> str:
        named = self.chat_template
        if isinstance(named, dict):
            chosen = named.get("tool_use") if has_tools else None
            named = chosen or named.get("default")
        if named is None:
            raise ValueError("expected a chat template, got none: take an instruct model")
        return named


def _plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without nulls, and with its reasoning under the names that templates read."""
    plain = {key: value for key, value in message.items() if value is not None}
    reasoning = next((plain[key] for key in _REASONING if key in plain), None)
    if reasoning is None:
        return plain
    return {"thinking": reasoning, **plain, "reasoning_content": reasoning}


@functools.lru_cache(8)
def _compiled(template: str) -> Any:
    """Compiles a template in the sandbox that transformers gives it."""
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The block ``{% generation %}``, which marks answers: its contents."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    class Namespace(jinja2.utils.Namespace):
        """Without names that begin with an underscore, as a way out of the sandbox."""

        def __setitem__(self, name: str, value: Any) -> None:
            if str(name).startswith("_"):
                raise jinja2.exceptions.SecurityError(f"a namespace cannot store {name!r}")
            super().__setitem__(name, value)

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.exceptions.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "dict": lambda *args, **kwargs: dict(*args, **kwargs),
        "namespace": Namespace,
    }
    return environment.from_string(template)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own escapes HTML.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
