from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiled_attn.text import TextPieces, Tokenizer

TEXTS = ["the 🎉 and 你好, wörld", "👨‍👩‍👧‍👦 family", "two  spaces", "a\n\nb", "नमस्ते", "x"]


def pieces_of(tokenizer: Tokenizer, tokens: list[int], **more: bool) -> list[str]:
    pieces = TextPieces(tokenizer, **more)
    return [*map(pieces.put, tokens), pieces.rest()]


@pytest.mark.parametrize("text", TEXTS)
def test_the_pieces_of_a_text_break_no_character_and_together_are_it(tokenizer, text):
    tokens = tokenizer.encode(text)
    pieces = pieces_of(tokenizer, tokens)
    assert "".join(pieces) == tokenizer.decode(tokens) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_of_several_tokens_comes_with_its_last(tokenizer):
    tokens = tokenizer.encode("a🎉b")
    pieces = [piece for piece in pieces_of(tokenizer, tokens) if piece]
    assert "".join(pieces) == "a🎉b"
    assert any("🎉" in piece for piece in pieces)


@pytest.mark.parametrize("special", [False, True])
@given(data=st.data())
def test_the_pieces_of_any_tokens_are_the_text_of_the_whole(tokenizer, data, special):
    """Bytes in any order too, whole characters or not, and special tokens between them."""
    numbers = st.integers(0, 264)
    tokens = data.draw(st.lists(numbers, max_size=24))
    pieces = pieces_of(tokenizer, tokens, special=special)
    assert "".join(pieces) == tokenizer.decode(tokens, special=special)


@given(st.text(max_size=12))
def test_the_pieces_of_any_text_are_its_text(tokenizer, text):
    text += "a"  # an empty one is refused
    tokens = tokenizer.encode(text)
    pieces = pieces_of(tokenizer, tokens)
    assert "".join(pieces) == tokenizer.decode(tokens)
    assert not any(0xD800 <= ord(each) < 0xE000 for each in "".join(pieces))


HALVES = st.sampled_from(["é", "你", "🎉", "a", " ", "\x80"])


@given(st.data())
def test_pieces_of_many_open_tokens_are_the_text_of_the_whole(tokenizer, data):
    """Runs of bytes that are no characters, longer than any character is."""
    letters = data.draw(st.lists(HALVES, min_size=1, max_size=4))
    numbers = sorted({token for each in letters for token in tokenizer.encode(each)})
    tokens = data.draw(st.lists(st.sampled_from(numbers), max_size=90))
    assert "".join(pieces_of(tokenizer, tokens)) == tokenizer.decode(tokens)


def test_tokens_without_a_whole_character_are_decoded_a_few_times_each(tokenizer, monkeypatch):
    decode, count = tokenizer.decode, []
    monkeypatch.setattr(
        tokenizer, "decode", lambda each, **_: count.append(len(each)) or decode(each)
    )
    half = tokenizer.encode("🎉")[-1]
    assert "".join(pieces_of(tokenizer, [half] * 2000)) == decode([half] * 2000)
    assert sum(count) < 2000 * 200
