"""The text of a request: whole, when it has finished, or in pieces of whole characters."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

from compiled_attn.engine.request_state import GenerationResult
from compiled_attn.engine.sampling import SamplingParams
from compiled_attn.text.tokenizer import REPLACEMENT, Tokenizer

__all__ = ["Answer", "AnswerPieces", "StopFilter", "TextPieces", "echo_of", "end_of"]


_BYTES = 4  # of a character at most
_MOST_OPEN = 4 * _BYTES


class TextPieces:
    """Decodes tokens as they come; all pieces together are the text of all tokens.

    Args:
        tokenizer: that of the model.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._told: list[int] = []  # of the last piece, which the next tokens are decoded with
        self._open: list[int] = []  # whose text may change with the next token

    def put(self, token: int) -> str:
        """What the token adds to the text; empty while a character is not whole yet."""
        if token in self._tokenizer.special:
            return ""
        self._open.append(token)
        if self._tokenizer.is_in_run(token):
            return ""
        piece = self._piece()
        if piece and self._tokenizer.is_settled(self._open, piece):
            return self._settle(len(self._open), piece)
        return self._settle_some() if len(self._open) > _MOST_OPEN else ""

    def _settle_some(self) -> str:
        """What the older of many open tokens add, which are bytes that are no characters: else each
        token would decode all of them again.
        """
        whole = self._piece()
        for count in range(len(self._open) - _BYTES, 0, -1):
            if self._tokenizer.is_in_run(self._open[count]):
                continue
            if whole.startswith(piece := self._piece(count)):
                return self._settle(count, piece)
        return ""

    def _settle(self, count: int, piece: str) -> str:
        self._told, self._open = self._open[:count], self._open[count:]
        return piece

    def rest(self) -> str:
        """What is left when no token follows, such as half a character (U+FFFD)."""
        return self._piece()

    def _piece(self, count: int | None = None) -> str:
        """What the first open tokens add, or all of them."""
        told = self._tokenizer.decode(self._told)
        return self._tokenizer.decode([*self._told, *self._open[:count]])[len(told) :]


def end_of(text: str, stop: Sequence[str]) -> int | None:
    """Where a text has to be cut: at the beginning of the stop string that is whole first.

    So it does not matter in which pieces the text came. None: it has no stop string.
    """
    found = [(at + len(each), at) for each in stop if (at := text.find(each)) >= 0]
    return min(found)[1] if found else None


class StopFilter:
    """Lets the pieces of a text through until a stop string, of which no part is shown.

    Args:
        stop: the strings, none of them empty.

    Attributes:
        has_ended: whether one of them came.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = stop
        self._held = ""
        self.has_ended = False

    def put(self, piece: str) -> str:
        """What can be shown now; what may be the beginning of a stop string is held back."""
        if self.has_ended:
            return ""
        text = self._held + piece
        end = end_of(text, self._stop)
        self.has_ended = end is not None
        shown = len(text) - self._undecided(text) if end is None else end
        self._held = text[shown:]
        return text[:shown]

    def rest(self) -> str:
        """What was held back, when nothing follows; nothing behind a stop string."""
        return "" if self.has_ended else self._held

    def _undecided(self, text: str) -> int:
        """Characters at the end of a text that a stop string may begin with."""
        longest = max(map(len, self._stop), default=1)
        return next(
            (
                size
                for size in range(min(longest - 1, len(text)), 0, -1)
                if any(each.startswith(text[-size:]) for each in self._stop)
            ),
            0,
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """What a prompt was answered with.

    Args:
        text: without end tokens, and without the stop string and what is behind it.
        result: tokens, times and why it ended: all that the engine tells.
    """

    text: str
    result: GenerationResult

    @staticmethod
    def of(result: GenerationResult, tokenizer: Tokenizer, end_tokens: Set[int]) -> Answer:
        """The answer of a finished request, which one of the end tokens may have ended."""
        text = tokenizer.decode(_shown(result, end_tokens))
        return Answer(text[: end_of(text, result.sampling.stop)], result)


def echo_of(result: GenerationResult, tokenizer: Tokenizer, end_tokens: Set[int]) -> str:
    """The text of a finished request behind that of its prompt, both as their tokens spell them."""
    prompt = tokenizer.decode(result.prompt).rstrip(REPLACEMENT)  # half a character may go on
    text = tokenizer.decode([*result.prompt, *_shown(result, end_tokens)])[len(prompt) :]
    return prompt + text[: end_of(text, result.sampling.stop)]


def _shown(result: GenerationResult, end_tokens: Set[int]) -> list[int]:
    has_end = bool(result.tokens) and result.tokens[-1] in end_tokens
    return result.tokens[:-1] if has_end else result.tokens


class AnswerPieces:
    """The text of a request in pieces, which together are that of its `Answer`.

    Args:
        tokenizer: that of the model.
        sampling: of the request, for its stop strings.
        end_tokens: tokens that end the request, see `compiled_attn.engine.Engine.end_tokens`.
    """

    def __init__(
        self, tokenizer: Tokenizer, sampling: SamplingParams, end_tokens: Set[int]
    ) -> None:
        self._pieces = TextPieces(tokenizer)
        self._filter = StopFilter(sampling.stop)
        self._end_tokens = end_tokens

    def put(self, token: int) -> str:
        """What can be shown with this token; often nothing."""
        return "" if token in self._end_tokens else self._filter.put(self._pieces.put(token))

    def rest(self) -> str:
        """What is left when the request has finished."""
        return self._filter.put(self._pieces.rest()) + self._filter.rest()
