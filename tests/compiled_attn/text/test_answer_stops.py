from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiled_attn.text import StopFilter
from compiled_attn.text.answer import end_of

STOPS = st.lists(st.text("abc", min_size=1, max_size=4), min_size=0, max_size=3)


def shown(stop: list[str], pieces: list[str]) -> list[str]:
    filtered = StopFilter(stop)
    return [*map(filtered.put, pieces), filtered.rest()]


def cut(text: str, stop: list[str]) -> str:
    """Character by character: the text up to the first stop string that is whole."""
    for end in range(len(text) + 1):
        starts = [end - len(each) for each in stop if text[:end].endswith(each)]
        if starts:
            return text[: min(starts)]
    return text


@given(STOPS, st.lists(st.text("abcd", max_size=4), max_size=8))
def test_however_a_text_comes_the_same_of_it_is_shown(stop, pieces):
    text = "".join(pieces)
    assert "".join(shown(stop, pieces)) == cut(text, stop) == text[: end_of(text, stop)]


@given(STOPS, st.lists(st.text("abcd", min_size=1, max_size=4), max_size=8))
def test_nothing_is_shown_that_a_stop_string_takes_back(stop, pieces):
    filtered, text = StopFilter(stop), ""
    for at, piece in enumerate(pieces):
        text += filtered.put(piece)
        assert cut("".join(pieces[: at + 1]), stop).startswith(text)


def test_only_what_may_become_a_stop_string_is_held_back():
    filtered = StopFilter(["\n\nUser:", "END"])
    assert filtered.put("Hello\n") == "Hello"
    assert filtered.put("\nUs") == ""
    assert filtered.put("ed it E") == "\n\nUsed it "
    assert (filtered.put("ND of it"), filtered.rest(), filtered.has_stopped) == ("", "", True)


@pytest.mark.parametrize(
    ("text", "stop", "end"),
    [("abc", ["abc", "b"], 1), ("xaby", ["ab", "xab"], 0), ("abc", ["d"], None), ("", ["a"], None)],
)
def test_the_string_that_is_whole_first_ends_the_text(text, stop, end):
    assert end_of(text, stop) == end
