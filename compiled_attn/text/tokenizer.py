"""The tokenizer of a model: prompts and chats to token ids, token ids to text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from compiled_attn.errors import ConfigError, ModelError
from compiled_attn.models import quiet_transformers
from compiled_attn.models.folder import cannot_read, model_folder
from graphs.errors import quoted
from graphs.installation import install_command

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["REPLACEMENT", "Message", "Prompt", "Tokenizer", "check_messages"]

Message: TypeAlias = Mapping[str, str]
"""One turn of a chat: its ``role`` (system, user, assistant) and ``content``."""

Prompt: TypeAlias = str | Sequence[Message]
"""A text to go on with, or a chat to answer."""

REPLACEMENT = "\ufffd"
"""What stands for bytes that are no character."""
_FILES = "tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json"

_SHOWN = [*range(33, 127), *range(161, 173), *range(174, 256)]
_BYTE_OF = {chr(byte): byte for byte in _SHOWN} | {
    chr(256 + place): byte for place, byte in enumerate(sorted({*range(256)} - {*_SHOWN}))
}
"""Bytes by the letters that stand for them in vocabularies of byte-level BPE, as GPT-2 has it."""


class Tokenizer:
    """What turns text into the token ids of a model, and back; nothing is downloaded.

    Special tokens, such as the end of a turn, are no part of a decoded text.

    Args:
        model: as for `compiled_attn.models.load_model`; or a tokenizer of transformers.

    Attributes:
        model: what it was made of, or the name of that.
        special: the ids that stand for no text.
        longest: letters of the longest token.

    Raises:
        ModelError: it has no tokenizer that transformers can read.
        TypeError: it is neither a place nor a tokenizer of transformers.
    """

    def __init__(self, model: str | Path | PreTrainedTokenizerBase) -> None:
        with quiet_transformers():
            if isinstance(model, (str, Path)):
                self.model, self._tokenizer = model, _load(model)
            else:
                self.model, self._tokenizer = _checked(model)
        added = self._tokenizer.added_tokens_decoder.items()
        self.special = frozenset(self._tokenizer.all_special_ids) | {
            number for number, token in added if token.special
        }
        # Tokens of one byte each (SentencePiece): a run of them is decoded as a whole.
        names = [f"<0x{byte:02X}>" for byte in range(256)]
        vocabulary = self._tokenizer.get_vocab()
        self.longest = max(map(len, vocabulary), default=1)
        self._bytes = frozenset(vocabulary[name] for name in names if name in vocabulary)

    @property
    def of_transformers(self) -> Any:
        """What does the work."""
        return self._tokenizer

    def encode(self, prompt: Prompt | Message) -> list[int]:
        """The ids of a text, with the special tokens that the model expects, or of a chat, which
        may be a single message.

        Raises:
            ConfigError: it is empty or has special tokens only, is not valid text, or is a chat
                that the model has no template for, or whose template refuses it.
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

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens without the special ones; a broken character is U+FFFD."""
        text: str = self._tokenizer.decode(
            list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def text_of(self, token: int) -> str:
        """The text of a token behind others, with the space that it may begin with; a special
        one's name; U+FFFD where it is a part of a character; empty where it has none.
        """
        alone = self._decode_all([token])
        if token in self.special:
            return alone
        # A decoder drops a space at the beginning: what a second one adds is whole.
        return self._decode_all([token, token]).removeprefix(alone)

    def bytes_of(self, token: int) -> bytes:
        """The bytes that a token stands for, where `text_of` has characters only."""
        text = self.text_of(token)
        if token in self._bytes:
            return bytes([int(self._tokenizer.convert_ids_to_tokens(token)[3:5], 16)])
        if REPLACEMENT in text:
            letters = self._tokenizer.convert_ids_to_tokens(token)
            if _BYTE_OF.keys() >= {*letters}:
                return bytes(_BYTE_OF[letter] for letter in letters)
        return text.encode()

    def is_settled(self, tokens: Sequence[int], text: str) -> bool:
        """Whether no token after these changes their text: it ends with a whole character."""
        return not text.endswith(REPLACEMENT) and not self.is_in_run(tokens[-1])

    def is_in_run(self, token: int) -> bool:
        """Whether a token is a byte of SentencePiece: a run of them is decoded as a whole, and one
        that is no character makes none of all.
        """
        return token in self._bytes

    def has_stop(self, tokens: Sequence[int], stop: Sequence[str]) -> bool:
        """Whether the text of tokens has one of the strings, which the last token ends.

        Only the end of the text is looked at: a step costs the same however long an answer is.
        """
        longest = max(map(len, stop))
        newest, count = len(self.decode(tokens[-1:])), 4
        while True:
            count = min(2 * count, len(tokens))
            text = self.decode(tokens[-count:])
            # More than can matter: at the beginning a space or half a character may be lost.
            if count == len(tokens) or len(text) > longest + newest + 2:
                return any(each in text for each in stop)

    def _decode_all(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(
            tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def _rendered(self, messages: Sequence[Message]) -> str:
        """The text of a chat, up to where the answer begins."""
        check_messages(messages)
        if not self._tokenizer.chat_template:
            raise ConfigError(
                f"model {self.model}: it has no chat template, expected chat_template.jinja beside "
                "its weights: take an instruct model, or give a prompt of text"
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


def _checked(given: Any) -> tuple[str, Any]:
    """The name of a tokenizer of transformers, and it."""
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
        f"model {model}: it has no tokenizer, expected a tokenizer.json beside its weights: save "
        "it there with save_pretrained"
    )


def check_messages(messages: Any) -> None:
    """Raises ConfigError unless these are messages of a chat."""
    is_chat = isinstance(messages, Sequence) and bool(messages)
    if not is_chat or not all(map(_is_message, messages)):
        raise ConfigError(
            "expected messages, each with a role and a content of text, got "
            f"{quoted(messages)}: such as [{{'role': 'user', 'content': 'Hello'}}]"
        )


def _is_message(message: Any) -> bool:
    return isinstance(message, Mapping) and all(
        isinstance(message.get(key), str) for key in ("role", "content")
    )
