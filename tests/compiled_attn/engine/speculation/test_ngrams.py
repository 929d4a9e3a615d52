"""N-grams are found as a search of the whole text finds them, however the text has grown."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from compiled_attn.engine.speculation.ngrams import NgramIndex, continuation


def search(tokens: list[int]) -> tuple[int, int]:
    for n in (4, 3, 2):
        for at in range(len(tokens) - 1, n - 1, -1):
            if tokens[at - n : at] == tokens[-n:]:
                return n, at
    return 0, 0


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), max_size=12))
def test_the_longest_n_gram_and_its_last_occurrence_are_found(pieces):
    index, tokens = NgramIndex(), []
    for piece in pieces:
        tokens += piece
        assert index.find(tokens) == search(tokens)
        assert index.find(tokens) == search(tokens)


def test_a_draft_continues_a_text_that_repeats_itself():
    tokens = [7, 1, 2, 3, 1, 2]
    assert continuation(tokens, NgramIndex().find(tokens)[1], 5) == [3, 1, 2, 3, 1]
    assert continuation(tokens, 1, 3) == [1, 2, 3]
