"""The size of a grammar, and the bounds that keep the compilation of most within a minute or so.

The time grows with the tokens of the vocabulary times the places of a text where any of many
characters may stand: classes, dots, strings of a schema that have a length; spelt out one behind
the other with the square of these. Places that may be empty (``?``, ``*``) cost more than that:
no bound of the text holds for all of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from compiled_attn.engine.grammar import Grammar

__all__ = ["too_large"]

_MOST_TEXT, _MOST_LEVELS, _MOST_PLACES = 1 << 16, 64, 1024
_PLACES_THAT_COST = 256  # of a repetition; further ones are the same to xgrammar
_QUOTED = re.compile(r'"(\\.|[^"\\])*"|\\.')
_REPEATED = re.compile(r"\{(\d*)(?:,(\d*))?\}")
_WIDE = re.compile(r"\\.|[.\[]")


def too_large(grammar: Grammar) -> str:
    """Why a grammar would take too long to compile, or too much memory; empty if it would not."""
    text = grammar.text
    if len(text) > _MOST_TEXT:
        return f"it has {len(text):,} characters, more than {_MOST_TEXT:,}"
    if _levels(text) > _MOST_LEVELS:
        return f"it is nested more than {_MOST_LEVELS} levels deep"
    if (places := _places(grammar)) > _MOST_PLACES:
        return (
            f"it has {places:,} places for any of several characters (classes, dots, minLength, "
            f"maxLength, {{m,n}}, each repetition counted up to {_PLACES_THAT_COST}), more than "
            f"{_MOST_PLACES:,}"
        )
    return ""


def _levels(text: str) -> int:
    levels = most = 0
    for character in _QUOTED.sub("", text):
        levels += (character in "[{(") - (character in "]})")
        most = max(most, levels)
    return most


def _places(grammar: Grammar) -> int:
    if grammar.kind != "json_schema":
        return _of_expression(grammar.text)
    try:
        return sum(_of_schema(json.loads(grammar.text)))
    except ValueError:
        return 0  # xgrammar tells what is wrong with it


def _of_schema(schema: Any) -> Iterator[int]:
    if isinstance(schema, list):
        for each in schema:
            yield from _of_schema(each)
    elif isinstance(schema, dict):
        for name, value in schema.items():
            if name in ("minLength", "maxLength") and isinstance(value, (int, float)):
                yield int(min(max(value, 0), _PLACES_THAT_COST))
            elif name == "pattern" and isinstance(value, str):
                yield _of_expression(value)
            elif name == "patternProperties" and isinstance(value, dict):
                yield sum(map(_of_expression, value))
            yield from _of_schema(value)


def _of_expression(text: str) -> int:
    repeated = _REPEATED.findall(text)
    counts = [max(int(number or 0) for number in found) for found in repeated]
    return len(_WIDE.findall(text)) + sum(min(count, _PLACES_THAT_COST) for count in counts)
