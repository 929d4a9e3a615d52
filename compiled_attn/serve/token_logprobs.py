"""Log-probabilities of tokens in the formats of the OpenAI protocol."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any, NamedTuple

from compiled_attn.engine import GenerationResult, TokenLogprobs
from compiled_attn.text import TextPieces, Tokenizer
from compiled_attn.text.tokenizer import REPLACEMENT

__all__ = [
    "OffsetCounter",
    "ScoredToken",
    "chat_logprobs",
    "completion_logprobs",
    "scored_tokens",
]


class ScoredToken(NamedTuple):
    """A token with its log-probabilities, and the characters of the text before it.

    The first token of a prompt has none, as nothing precedes it.
    """

    token: int
    scores: TokenLogprobs | None
    offset: int


class OffsetCounter:
    """Computes the offset of each token in the text of all tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._pieces = TextPieces(tokenizer)
        self._characters = 0

    def add(self, token: int, scores: TokenLogprobs | None) -> ScoredToken:
        """Adds the next token; its offset counts whole characters."""
        offset = self._characters + len(self._pieces.rest().rstrip(REPLACEMENT))
        self._characters += len(self._pieces.put(token))
        return ScoredToken(token, scores, offset)


def scored_tokens(
    result: GenerationResult, tokenizer: Tokenizer, end_tokens: Set[int], *, echo: bool
) -> list[ScoredToken]:
    """Returns the tokens of a finished answer with their log-probabilities and offsets.

    With ``echo`` the prompt comes first, and an end token, which is not part of the text, stays:
    programs that score texts drop the last token, whichever it is.
    """
    offsets = OffsetCounter(tokenizer)
    own = [(each.token, each) for each in result.logprobs or ()]
    if not echo:
        return [offsets.add(*each) for each in own if each[0] not in end_tokens]
    prompt = zip(result.prompt, result.prompt_logprobs or (), strict=True)
    return [offsets.add(*each) for each in (*prompt, *own)]


def chat_logprobs(tokens: Sequence[ScoredToken], tokenizer: Tokenizer) -> dict[str, Any]:
    """Builds the field ``logprobs`` of a chat's choice."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text, own = tokenizer.text_of(token), [*tokenizer.bytes_of(token)]
        return {"token": text, "bytes": own, "logprob": logprob}

    content = [
        {**entry(token, scores.logprob), "top_logprobs": [entry(*pair) for pair in scores.top]}
        for token, scores, _ in tokens
        if scores is not None
    ]
    return {"content": content}


def completion_logprobs(tokens: Sequence[ScoredToken], tokenizer: Tokenizer) -> dict[str, Any]:
    """Builds the field ``logprobs`` of a completion's choice."""

    def top(scores: TokenLogprobs) -> dict[str, float]:
        return {tokenizer.text_of(token): logprob for token, logprob in reversed(scores.top)}

    return {
        "tokens": [tokenizer.text_of(token) for token, _, _ in tokens],
        "token_logprobs": [scores and scores.logprob for _, scores, _ in tokens],
        "top_logprobs": [scores and top(scores) for _, scores, _ in tokens],
        "text_offset": [offset for _, _, offset in tokens],
    }
