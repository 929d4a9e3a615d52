import json

import pytest

from graphs.errors import clipped, parse_json, quoted


@pytest.mark.parametrize("text", ["null", "[1, 2.5]", b'{"a": "\xc3\xa9"}'])
def test_json_is_read_as_ever(text):
    assert parse_json(text) == json.loads(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{oops", "not valid JSON: Expecting property name .* at column 2"),
        (b"\xff\xff\xff", "not UTF-8"),
        ("[" * 200_000, "nested too deeply"),
        ('{"a":' * 200_000, "nested too deeply"),
        ("9" * 100_000, "too many digits"),
    ],
)
def test_what_cannot_be_read_is_a_value_error_of_one_short_line(text, reason):
    with pytest.raises(ValueError, match=reason) as caught:
        parse_json(text)
    assert len(str(caught.value)) < 100 and "\n" not in str(caught.value)


def test_a_quotation_is_short_whatever_is_quoted():
    assert quoted("as it is") == "'as it is'"
    assert quoted("x" * 10**6) == f"'{'x' * 80}'..."
    assert quoted([1, 2]) == "[1, 2]" and len(quoted([1] * 1000)) == 83
    assert clipped("abcdef", 3) == "abc..." and clipped("abc", 3) == "abc"
