"""Grammars of an answer: a JSON schema, a regular expression, or rules in EBNF."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from graphs.errors import parse_json, quoted

__all__ = ["Grammar"]


@dataclass(frozen=True, slots=True)
class Grammar:
    """Constrains the text of an answer; made by one of the functions below.

    Args:
        kind: syntax of ``text``.
        text: JSON schema, regular expression, or EBNF rules.

    Example::

        Grammar.json_schema({"type": "object", "properties": {"age": {"type": "integer"}}})
        Grammar.regex("yes|no")
        Grammar.ebnf('root ::= "yes" | "no"')
    """

    kind: Literal["json_schema", "regex", "ebnf"]
    text: str

    @staticmethod
    def json_schema(schema: Mapping[str, Any] | str) -> Grammar:
        """Allows JSON of a schema, with its properties in order; others only with
        ``additionalProperties``.

        Args:
            schema: mapping, or JSON text.

        Raises:
            ValueError: it is neither.
        """
        try:
            text = schema if isinstance(schema, str) else json.dumps(dict(schema))
            if isinstance(parse_json(text), (dict, bool)):
                return Grammar("json_schema", text)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"expected a JSON schema, got {quoted(schema)}: {error}") from error
        raise ValueError(f"expected a JSON schema, which is an object, got {quoted(schema)}")

    @staticmethod
    def json_object() -> Grammar:
        """Allows any JSON object."""
        return Grammar("json_schema", '{"type": "object"}')

    @staticmethod
    def regex(pattern: str) -> Grammar:
        """Allows text that fully matches a regular expression; ``.`` also matches line ends.

        Raises:
            ValueError: it is not text.
        """
        return Grammar("regex", _text(pattern))

    @staticmethod
    def ebnf(rules: str) -> Grammar:
        """Allows text that rules derive from ``root``, written as llama.cpp's GBNF.

        Raises:
            ValueError: it is not text.
        """
        return Grammar("ebnf", _text(rules))


def _text(given: Any) -> str:
    try:
        given.encode()
        return str(given)
    except (AttributeError, UnicodeEncodeError):
        raise ValueError(f"expected a grammar of valid text, got {quoted(given)}") from None
