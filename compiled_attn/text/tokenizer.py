"""The tokenizer of a model: encodes prompts and chats, decodes token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from compiled_attn.errors import ConfigError, ModelError
from compiled_attn.models import quiet_transformers
from compiled_attn.models.folder import cannot_read, model_folder
from compiled_attn.text.plain_tokenizer import PlainTokenizer
from graphs.errors import quoted
from graphs.installation import install_command

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["REPLACEMENT", "Message", "Prompt", "Tokenizer", "check_messages"]

Message: TypeAlias = Mapping[str, str]
"""One turn of a chat: its ``role`` (system, user, assistant) and ``content``."""

Prompt: TypeAlias = str | Sequence[Message]
"""A text to continue, or a chat to answer."""

REPLACEMENT = "\ufffd"
"""Stands for bytes that are no character."""
_FILES = "tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json"

_SHOWN = [*range(33, 127), *range(161, 173), *range(174, 256)]
_BYTE_OF = {chr(byte): byte for byte in _SHOWN} | {
    chr(256 + place): byte for place, byte in enumerate(sorted({*range(256)} - {*_SHOWN}))
}
"""Bytes by their letters in vocabularies of byte-level BPE (GPT-2)."""


class Tokenizer:
    """Encodes text to the token ids of a model and decodes them; downloads nothing.

    Special tokens, such as the end of a turn, are not part of a decoded text.

    Args:
        model: as for `compiled_attn.models.load_model`; or a tokenizer of transformers, or a
            `PlainTokenizer`.

    Attributes:
        model: the argument, or the name of the tokenizer.
        special: ids that stand for no text.
        longest: characters of the longest token.

    Raises:
        ModelError: the model has no tokenizer that transformers can read.
        TypeError: `model` is neither a path nor a tokenizer of transformers.
    """

    def __init__(self, model: str | Path | PreTrainedTokenizerBase | PlainTokenizer) -> None:
        self._tokenizer: Any = model
        if isinstance(model, PlainTokenizer):
            self.model: str | Path = model.name_or_path
        else:
            with quiet_transformers():
                is_path = isinstance(model, (str, Path))
                self.model, self._tokenizer = (model, _load(model)) if is_path else _checked(model)
        added = self._tokenizer.added_tokens_decoder.items()
        self.special = frozenset(self._tokenizer.all_special_ids) | {
            number for number, token in added if token.special
        }
        self._backend = _plain_backend(self._tokenizer)
        self._text_of_one: dict[int, str] = {}
        # Tokens of one byte each (SentencePiece): a run of them is decoded as a whole.
        names = [f"<0x{byte:02X}>" for byte in range(256)]
        vocabulary = self._tokenizer.get_vocab()
        self.longest = max(map(len, vocabulary), default=1)
        self._bytes = frozenset(vocabulary[name] for name in names if name in vocabulary)

    @property
    def of_transformers(self) -> Any:
        """The tokenizer of transformers, or the `PlainTokenizer` in its place."""
        return self._tokenizer

    def encode(self, prompt: Prompt | Message) -> list[int]:
        """Encodes a text, with the special tokens that the model expects, or a chat or message.

        Raises:
            ConfigError: the prompt is empty, has special tokens only, is not valid text, or is a
                chat without a template or that the template refuses.
        """
        is_text = isinstance(prompt, str)
        if isinstance(prompt, Mapping):
            prompt = [prompt]
        text = prompt if isinstance(prompt, str) else self._rendered(prompt)
        if not isinstance(text, str):
            raise ConfigError(f"expected a prompt of text or messages, got {quoted(prompt)}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"expected a prompt of valid text, got {quoted(prompt)}: save it as UTF-8"
            ) from error
        tokens: list[int] = self._tokenizer(text, add_special_tokens=is_text).input_ids
        if self.special.issuperset(tokens):
            got = f"only special tokens, {quoted(text)}" if text else "an empty one"
            raise ConfigError(f"expected a prompt with text, got {got}: give it a word to go on")
        return tokens

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Decodes tokens, by default without special ones; an incomplete character is U+FFFD."""
        if len(tokens) != 1 or special:
            return self._decode(tokens, skip_special_tokens=not special)
        (token,) = tokens
        if (text := self._text_of_one.get(token)) is None:
            text = self._text_of_one[token] = self._decode(tokens, skip_special_tokens=True)
        return text

    def text_of(self, token: int) -> str:
        """Returns the text of a token after others, with its leading space.

        A special token has its name, a part of a character U+FFFD.
        """
        alone = self._decode([token])
        if token in self.special:
            return alone
        # Decoders drop a leading space: a second token has it.
        return self._decode([token, token]).removeprefix(alone)

    def bytes_of(self, token: int) -> bytes:
        """Returns the bytes of a token, also where it is a part of a character."""
        text = self.text_of(token)
        if token in self._bytes:
            return bytes([int(self._tokenizer.convert_ids_to_tokens(token)[3:5], 16)])
        if REPLACEMENT in text:
            letters = self._tokenizer.convert_ids_to_tokens(token)
            if _BYTE_OF.keys() >= {*letters}:
                return bytes(_BYTE_OF[letter] for letter in letters)
        return text.encode()

    def is_settled(self, tokens: Sequence[int], text: str) -> bool:
        """Whether no further token changes the text of these: it ends with a whole character."""
        return not text.endswith(REPLACEMENT) and not self.is_in_run(tokens[-1])

    def is_in_run(self, token: int) -> bool:
        """Whether a token is a byte of SentencePiece, which is decoded with its neighbours."""
        return token in self._bytes

    def has_stop(self, tokens: Sequence[int], stop: Sequence[str]) -> bool:
        """Whether the text of tokens has one of the strings, completed by the last token.

        Decodes only the end of the text: a step costs the same however long an answer is.
        """
        longest = max(map(len, stop))
        newest, count = len(self.decode(tokens[-1:])), 4
        while True:
            count = min(2 * count, len(tokens))
            text = self.decode(tokens[-count:])
            # 2 more: the first token may lose a space or half a character.
            if count == len(tokens) or len(text) > longest + newest + 2:
                return any(each in text for each in stop)

    def _decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        text: str
        if self._backend is not None:
            text = self._backend.decode(list(tokens), skip_special_tokens=skip_special_tokens)
        else:
            text = self._tokenizer.decode(
                list(tokens),
                skip_special_tokens=skip_special_tokens,
                clean_up_tokenization_spaces=False,
            )
        return text

    def _rendered(self, messages: Sequence[Message]) -> str:
        check_messages(messages)
        if not self._tokenizer.chat_template:
            raise ConfigError(
                f"model {self.model}: it has no chat template, expected chat_template.jinja next "
                "to its weights: take an instruct model, or give a prompt of text"
            )
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True
            )
        except ImportError as error:
            raise ModelError(
                f"chat templates need jinja2, which is not installed: {install_command('hf')}"
            ) from error
        except Exception as error:  # a template is a program of the model's
            raise ConfigError(
                f"expected messages that the model's chat template takes, got {quoted(messages)}: "
                f"{error}"
            ) from error
        return text


def _plain_backend(tokenizer: Any) -> Any:
    """Returns the Rust tokenizer if it alone decodes, which is several times faster; else None."""
    if isinstance(tokenizer, PlainTokenizer):
        return tokenizer.backend
    from transformers import PreTrainedTokenizerFast

    own, plain = type(tokenizer), PreTrainedTokenizerFast
    if not isinstance(tokenizer, plain):
        return None
    is_plain = own.decode is plain.decode and own._decode is plain._decode
    return tokenizer.backend_tokenizer if is_plain else None


def _checked(given: Any) -> tuple[str, Any]:
    from transformers import PreTrainedTokenizerBase

    if not isinstance(given, PreTrainedTokenizerBase):
        raise TypeError(
            f"expected a tokenizer of transformers or a directory, got a {type(given).__name__}: "
            "load one with AutoTokenizer.from_pretrained"
        )
    return given.name_or_path or type(given).__name__, given


def _load(model: str | Path) -> Any:
    from transformers import AutoTokenizer

    folder = model_folder(model)
    if not any(any(folder.glob(pattern)) for pattern in _FILES):
        raise _without_tokenizer(model)
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # a damaged file fails anywhere in the loading code
        raise cannot_read(model, "a tokenizer from it", error) from error
    # Of some families transformers makes one without a vocabulary where that file is missing.
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise _without_tokenizer(model)
    return tokenizer


def _without_tokenizer(model: str | Path) -> ModelError:
    return ModelError(
        f"model {model}: it has no tokenizer, expected a tokenizer.json next to its weights: save "
        "it there with save_pretrained"
    )


def check_messages(messages: Any) -> None:
    """Raises ConfigError unless these are messages of a chat."""
    is_chat = isinstance(messages, Sequence) and bool(messages)
    if not is_chat or not all(
        isinstance(each, Mapping) and isinstance(each.get(key), str)
        for each in messages
        for key in ("role", "content")
    ):
        raise ConfigError(
            "expected messages, each with a role and a content of text, got "
            f"{quoted(messages)}: such as [{{'role': 'user', 'content': 'Hello'}}]"
        )
