"""Grammars that are lists of words, each a run of token ids: what may follow is obvious."""

from __future__ import annotations

from functools import partial

import numpy as np

from compiled_attn.engine import Grammar
from compiled_attn.errors import ConfigError

Word = tuple[int, ...]


def grammar_of(*words: Word) -> Grammar:
    return Grammar.ebnf("|".join(" ".join(map(str, word)) for word in words))


def next_of(words: list[Word], start: Word) -> set[int]:
    """Reference: tokens that may follow."""
    count = len(start)
    return {word[count] for word in words if len(word) > count and word[:count] == start}


class WordMatcher:
    """The state of a text among words; fails on request of a test."""

    def __init__(self, words: list[Word], fails: set[str]) -> None:
        self.words, self.start, self._fails = words, (), fails

    def accept_token(self, token_id: int) -> bool:
        self._fail("accept")
        if token_id not in next_of(self.words, self.start):
            return False
        self.start = (*self.start, token_id)
        return True

    def is_completed(self) -> bool:
        self._fail("completed")
        return self.start in self.words

    def allowed(self) -> set[int]:
        self._fail("allowed")
        return next_of(self.words, self.start)

    def _fail(self, what: str) -> None:
        if what in self._fails and any(len(word) == 1 for word in self.words):
            raise RuntimeError(f"injected in {what}")


class Words:
    """Grammars over a vocabulary; those with a word of one token fail in ``fails``."""

    def __init__(self, vocab: int = 128) -> None:
        self.vocab = vocab
        self.fails: set[str] = set()

    def compiled(self, grammar: Grammar):
        words = [tuple(map(int, word.split())) for word in grammar.text.split("|")]
        if not any(words):
            raise ConfigError("expected words, got none")
        return partial(WordMatcher, words, self.fails)

    def masks(self, matchers):
        bits = np.zeros((len(matchers), -(-self.vocab // 32) * 32), np.uint8)
        for row, matcher in enumerate(matchers):
            bits[row, [token for token in matcher.allowed() if token < self.vocab]] = 1
        return np.packbits(bits, axis=1, bitorder="little").view(np.int32)
