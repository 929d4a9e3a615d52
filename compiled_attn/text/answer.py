"""Decodes generated tokens: whole answers, or pieces of whole characters as tokens come."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import partial

from compiled_attn.engine.request_state import GenerationResult
from compiled_attn.engine.sampling import SamplingParams
from compiled_attn.text.tokenizer import REPLACEMENT, Tokenizer

__all__ = ["Answer", "AnswerPieces", "StopFilter", "TextPieces", "echo_of", "end_of"]

_MAX_CHARACTER_BYTES = 4
_MAX_OPEN = 4 * _MAX_CHARACTER_BYTES


class TextPieces:
    """Decodes tokens as they come; all pieces together are the text of all tokens.

    With ``special`` the special tokens are part of the text.
    """

    def __init__(self, tokenizer: Tokenizer, *, special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._decode = partial(tokenizer.decode, special=special)
        self._hidden = frozenset[int]() if special else tokenizer.special
        self._context: list[int] = []  # of the last piece: the next tokens are decoded after it
        self._context_text = ""
        self._open: list[int] = []  # whose text may change with the next token

    def put(self, *tokens: int) -> str:
        """Returns what tokens add to the text; empty while a character is incomplete."""
        self._open += [token for token in tokens if token not in self._hidden]
        if not self._open or self._tokenizer.is_in_run(self._open[-1]):
            return ""
        piece = self._piece()
        if piece and self._tokenizer.is_settled(self._open, piece):
            return self._settle(len(self._open), piece)
        return self._settle_some() if len(self._open) > _MAX_OPEN else ""

    def _settle_some(self) -> str:
        """Settles the older of many open tokens, bytes of no character: otherwise each token would
        decode all of them again.
        """
        whole = self._piece()
        for count in range(len(self._open) - _MAX_CHARACTER_BYTES, 0, -1):
            if self._tokenizer.is_in_run(self._open[count]):
                continue
            if whole.startswith(piece := self._piece(count)):
                return self._settle(count, piece)
        return ""

    def _settle(self, count: int, piece: str) -> str:
        self._context, self._open = self._open[:count], self._open[count:]
        self._context_text = self._decode(self._context)
        return piece

    def rest(self) -> str:
        """Returns the rest after the last token, such as half a character (U+FFFD)."""
        return self._piece()

    def _piece(self, count: int | None = None) -> str:
        """Text of the first `count` open tokens, or of all."""
        text = self._decode([*self._context, *self._open[:count]])
        return text[len(self._context_text) :]


def end_of(text: str, stop: Sequence[str]) -> int | None:
    """Returns where to cut a text: at the start of the stop string that is complete first.

    So it does not matter in which pieces the text came. None: it has no stop string.
    """
    found = [(at + len(each), at) for each in stop if (at := text.find(each)) >= 0]
    return min(found)[1] if found else None


class StopFilter:
    """Passes pieces of text on until a stop string, of which no part is shown.

    ``has_stopped`` is whether one of the strings came, none of which is empty.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop, self._held, self.has_stopped = stop, "", False

    def put(self, piece: str) -> str:
        """Returns what can be shown now; a possible start of a stop string is held back."""
        if not self._stop:
            return piece
        if self.has_stopped:
            return ""
        text = self._held + piece
        end = end_of(text, self._stop)
        self.has_stopped = end is not None
        shown = len(text) - self._undecided(text) if end is None else end
        self._held = text[shown:]
        return text[:shown]

    def rest(self) -> str:
        """Returns what was held back, after the last piece; nothing after a stop string."""
        return "" if self.has_stopped else self._held

    def _undecided(self, text: str) -> int:
        most = min(max(map(len, self._stop)) - 1, len(text))
        starts = (
            size
            for size in range(most, 0, -1)
            if any(each.startswith(text[-size:]) for each in self._stop)
        )
        return next(starts, 0)


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a prompt: its text without end tokens, a stop string and what follows it, and
    the result of the engine with tokens, times and finish reason.
    """

    text: str
    result: GenerationResult

    @staticmethod
    def of(result: GenerationResult, tokenizer: Tokenizer, end_tokens: Set[int]) -> Answer:
        """Decodes the answer of a finished request, which may end with one of the end tokens."""
        text = tokenizer.decode(_shown(result, end_tokens))
        return Answer(text[: end_of(text, result.sampling.stop)], result)


def echo_of(result: GenerationResult, tokenizer: Tokenizer, end_tokens: Set[int]) -> str:
    """Returns the text of a prompt and its answer, both as their tokens spell them."""
    prompt = tokenizer.decode(result.prompt).rstrip(REPLACEMENT)  # may end in half a character
    text = tokenizer.decode([*result.prompt, *_shown(result, end_tokens)])[len(prompt) :]
    return prompt + text[: end_of(text, result.sampling.stop)]


def _shown(result: GenerationResult, end_tokens: Set[int]) -> list[int]:
    has_end = bool(result.tokens) and result.tokens[-1] in end_tokens
    return result.tokens[:-1] if has_end else result.tokens


class AnswerPieces:
    """Decodes an answer in pieces, which together are the text of its `Answer`.

    ``end_tokens`` are those of `compiled_attn.engine.Engine.end_tokens`.
    """

    def __init__(
        self, tokenizer: Tokenizer, sampling: SamplingParams, end_tokens: Set[int]
    ) -> None:
        self._pieces = TextPieces(tokenizer)
        self._filter = StopFilter(sampling.stop)
        self._end_tokens = end_tokens

    def put(self, *tokens: int) -> str:
        """Returns what can be shown with these tokens; often nothing."""
        own = [token for token in tokens if token not in self._end_tokens]
        return self._filter.put(self._pieces.put(*own)) if own else ""

    def rest(self) -> str:
        """Returns the rest after the last token."""
        return self._filter.put(self._pieces.rest()) + self._filter.rest()
