"""Drafts from the request's own tokens: what followed the last n-gram where it came before.

Saxena, "Prompt Lookup Decoding", 2023.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["LONGEST_NGRAM", "NgramIndex", "continuation"]

LONGEST_NGRAM, _SHORTEST = 4, 2


class NgramIndex:
    """Finds earlier occurrences of the last tokens of a growing text.

    Each token is indexed once, when a later token shows what follows it.
    """

    def __init__(self) -> None:
        # By length: position after the last occurrence of each n-gram.
        self._after: dict[int, dict[tuple[int, ...], int]] = {
            n: {} for n in range(LONGEST_NGRAM, _SHORTEST - 1, -1)
        }
        self._indexed = 0

    def find(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Returns the length of the longest n-gram (4 to 2) that ends the text and came before, and
        the position after its last earlier occurrence; 0 and 0 if there is none.

        Args:
            tokens: the text of the previous call, possibly with more tokens.
        """
        length, first = len(tokens), self._indexed
        for n, after in self._after.items():
            start = max(first, n)
            if length - start == 1:  # most calls
                after[tuple(tokens[start - n : start])] = start
            elif start < length:
                grams = zip(
                    *(tokens[start - n + i : length - n + i] for i in range(n)), strict=True
                )
                after.update(zip(grams, range(start, length), strict=True))
        self._indexed = max(first, length)
        for n, after in self._after.items():
            if at := after.get(tuple(tokens[-n:]), 0):
                return n, at
        return 0, 0


def continuation(tokens: Sequence[int], at: int, count: int) -> list[int]:
    """Returns ``count`` tokens from position ``at`` on; a text that ends before that is assumed to
    repeat itself from there.
    """
    period = tokens[at : at + count]
    return [period[n % len(period)] for n in range(count)]
