"""The text of a request: whole, when it has finished, or in pieces while it is generated."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from compiled_attn.engine.sampling import SamplingParams
from compiled_attn.engine.sequence import GenerationResult
from compiled_attn.text.pieces import TextPieces
from compiled_attn.text.stops import StopFilter, end_of
from compiled_attn.text.tokenizer import Tokenizer

__all__ = ["Answer", "AnswerPieces"]


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
        tokens = result.tokens
        if tokens and tokens[-1] in end_tokens:
            tokens = tokens[:-1]
        text = tokenizer.decode(tokens)
        return Answer(text[: end_of(text, result.sampling.stop)], result)


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
