"""Finds keywords of JSON schemas that xgrammar ignores, as tried with 0.2.8."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["unenforced"]

_NEVER = (
    *("multipleOf", "not", "uniqueItems", "if", "then", "else", "contains"),
    *("minContains", "maxContains", "dependentRequired", "dependentSchemas", "dependencies"),
    *("extends", "disallow"),
)
_NEEDS_TYPE = {
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), "number"),
    **dict.fromkeys(("minLength", "maxLength", "pattern"), "string"),
    **dict.fromkeys(("minItems", "maxItems"), "array"),
    **dict.fromkeys(("minProperties", "maxProperties", "patternProperties"), "object"),
    **dict.fromkeys(("propertyNames", "required"), "object"),
}
_IMPLY_TYPE = {
    "array": ("items", "prefixItems", "unevaluatedItems"),
    "object": ("properties", "additionalProperties", "unevaluatedProperties"),
}
_EXCLUSIVE = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
"""xgrammar reads one of these, and no other keyword next to it."""
_CONSTRAINTS = (
    *_EXCLUSIVE,
    *_NEEDS_TYPE,
    *(each for names in _IMPLY_TYPE.values() for each in names),
)
_SCHEMA_KEYS = ("items", "additionalProperties", "unevaluatedItems", "unevaluatedProperties")
_LIST_KEYS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAP_KEYS = ("properties", "patternProperties", "$defs", "definitions")


def unenforced(schema: Any) -> str:
    """Returns a message on the first keyword that answers could violate; empty if there is none.

    Keywords that only describe (``title``, ``default``, an unknown ``format``) are ignored, and
    ``oneOf`` is taken as ``anyOf``.
    """
    left = [schema]
    while left:
        if isinstance(node := left.pop(), Mapping):
            if reason := _check_node(node):
                return reason
            left.extend(_children(node))
    return ""


def _children(node: Mapping[str, Any]) -> Iterator[Any]:
    for name in _SCHEMA_KEYS:
        yield node.get(name)
    for name in _LIST_KEYS:
        if isinstance(found := node.get(name), list):
            yield from found
    for name in _MAP_KEYS:
        if isinstance(found := node.get(name), Mapping):
            yield from found.values()


def _check_node(node: Mapping[str, Any]) -> str:
    for name in _NEVER:
        if name in node and node[name] is not False:
            return f"the grammar does not enforce {name}"
    exclusive = next((each for each in _EXCLUSIVE if each in node), None)
    if exclusive is not None:
        return _next_to(node, exclusive)
    if "propertyNames" in node and node.get("properties"):
        return "the grammar does not enforce propertyNames next to properties"
    for other in ("minLength", "maxLength", "format"):
        if "pattern" in node and other in node:
            return f"the grammar does not enforce {other} next to pattern"
        if "format" in node and other in node and other != "format":
            return f"the grammar does not enforce {other} next to format"
    for name, kind in _NEEDS_TYPE.items():
        implied = any(each in node for each in _IMPLY_TYPE.get(kind, ()))
        if name in node and "type" not in node and not implied:
            return f"the grammar does not enforce {name} without a type: add it"
    return _missing(node)


def _next_to(node: Mapping[str, Any], exclusive: str) -> str:
    for other in _CONSTRAINTS:
        if other in node and other != exclusive:
            return f"the grammar does not enforce {other} next to {exclusive}"
    branches = node.get("allOf")
    if isinstance(branches, list) and len(branches) > 1:
        return "the grammar does not enforce allOf of several schemas: merge them"
    return ""


def _missing(node: Mapping[str, Any]) -> str:
    required, known = node.get("required"), node.get("properties", {})
    if not isinstance(required, list) or not isinstance(known, Mapping):
        return ""
    for name in required:
        if isinstance(name, str) and name not in known:
            return f"the grammar does not enforce required of {name!r}, which properties lack"
    return ""
