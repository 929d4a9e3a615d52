"""Constrains the tokens of a request by its grammar, with masks of logits.

The state of a grammar follows from the tokens of the request alone, so a rollback or preemption
undoes nothing: before each mask the new tokens are read, or all of them if an earlier one changed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compiled_attn.engine.grammar import Grammar
from compiled_attn.errors import ConfigError

__all__ = ["Constraint", "Grammars", "Matcher", "constrain", "without_grammars"]

_LAST_ID = 2**31 - 1  # largest token id of any vocabulary


class Matcher(Protocol):
    """The state of a grammar, as xgrammar's `GrammarMatcher`."""

    def accept_token(self, token_id: int) -> bool:
        """Reads a token; False: it is not allowed here, and nothing has changed."""

    def is_completed(self) -> bool:
        """Whether the text may end here."""


class Grammars(Protocol):
    """Compiles grammars over the tokens of a vocabulary, from any thread."""

    def compiled(self, grammar: Grammar) -> Callable[[], Matcher]:
        """Returns a maker of matchers at the start of a grammar, which is compiled once.

        Raises:
            ConfigError: it cannot be compiled, or no token can start it.
        """

    def masks(self, matchers: Sequence[Matcher]) -> NDArray[np.int32]:
        """Returns masks ``[n, words]`` of the tokens that may come next: bit ``t % 32`` of word
        ``t // 32`` is that of token t; 0 for tokens without a text, such as end-of-sequence.
        """


class Constraint:
    """The grammar of one request, which reads its tokens.

    Args:
        prompt_len: tokens of its prompt, which the grammar ignores.
        ends: tokens that end it, which may come where the text may end, and only there.
        vocab: tokens of the model.
    """

    def __init__(
        self,
        grammars: Grammars,
        grammar: Grammar,
        prompt_len: int,
        ends: Collection[int],
        vocab: int = _LAST_ID,
    ) -> None:
        self.grammars = grammars
        self._vocab = vocab
        self.ends = np.array(sorted(end for end in ends if 0 <= end <= _LAST_ID), np.int64)
        self._make = grammars.compiled(grammar)
        self._matcher: Matcher | None = None
        self._prompt_len = prompt_len
        self._read = (prompt_len, -1)  # how many tokens, and the last of them

    def after(self, text: Sequence[int]) -> Matcher:
        """Returns the matcher after a text, prompt included.

        Args:
            text: the text of the previous call, possibly with another last token and more tokens.

        Raises:
            ValueError: the grammar does not allow it.
        """
        matcher, self._matcher = self._matcher, None  # an exception leaves none
        count, last = self._read
        if matcher is None or len(text) < count or text[count - 1] != last:
            matcher, count = self._make(), self._prompt_len
        for token in text[count:]:
            if not matcher.accept_token(token):
                raise ValueError(f"expected a token that the grammar allows, got {token}")
        self._read, self._matcher = (len(text), text[-1]), matcher
        return matcher

    def is_over(self, text: Sequence[int]) -> bool:
        """Whether a text can only end here, see `after`."""
        matcher = self.after(text)
        if not matcher.is_completed():
            return False
        allowed = _bits(self.grammars.masks([matcher]))[0, : self._vocab]
        allowed[self.ends[self.ends < len(allowed)]] = 0
        return not allowed.any()


def without_grammars(grammar: Grammar) -> ConfigError:
    """Makes the error of an engine without grammars."""
    return ConfigError(
        f"expected no grammar, as this engine has no tokenizer, got {grammar}: use "
        "compiled_attn.LLM, or give the engine grammars"
    )


def constrain(
    logits: Tensor, constraints: Sequence[Constraint | None], texts: Sequence[Sequence[int]]
) -> None:
    """Sets tokens that the grammars do not allow to minus infinity, in all rows at once.

    Args:
        logits: ``[n, vocab]``, any float dtype; rows without a constraint stay as they are. Tokens
            beyond the vocabulary of the grammars (padding of the model's) are never allowed.
        constraints: n, one for each row; None: none.
        texts: n, the tokens of each row so far, prompt included.

    Raises:
        ValueError: see `Constraint.after`.
    """
    active = {row: each for row, each in enumerate(constraints) if each is not None}
    if not active:
        return
    matchers = [each.after(texts[row]) for row, each in active.items()]
    known = next(iter(active.values())).grammars.masks(matchers)
    masks = np.full((len(logits), -(-logits.shape[1] // 32)), -1, np.int32)
    rows, words = [*active], min(masks.shape[1], known.shape[1])
    masks[rows] = 0
    masks[rows, :words] = known[:, :words]
    banned = _bits(~masks)[:, : logits.shape[1]]
    ends = [each.ends[each.ends < banned.shape[1]] for each in active.values()]
    counts = [len(each) for each in ends]
    waits = np.repeat([not matcher.is_completed() for matcher in matchers], counts)
    banned[np.repeat(rows, counts), np.concatenate(ends)] = waits
    logits.masked_fill_(torch.from_numpy(banned).bool().to(logits.device), -torch.inf)


def _bits(masks: NDArray[np.int32]) -> NDArray[np.uint8]:
    """Unpacks masks ``[n, words]`` to bits ``[n, 32 * words]``."""
    return np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
