"""Keywords of JSON schemas that xgrammar ignores, as tried with 0.2.8."""

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
_DECIDING = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
"""xgrammar reads one of these and nothing beside it."""
_CONSTRAINTS = (
    *_DECIDING,
    *_NEEDS_TYPE,
    *(each for names in _IMPLY_TYPE.values() for each in names),
)
_OF_ONE = ("items", "additionalProperties", "unevaluatedItems", "unevaluatedProperties")
_OF_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_OF_NAMES = ("properties", "patternProperties", "$defs", "definitions")


def unenforced(schema: Any) -> str:
    """Names the first keyword that answers could violate, with a remedy; empty if there is none.

    Keywords that only describe (``title``, ``default``, an unknown ``format``) are ignored, and
    ``oneOf`` is taken as ``anyOf``.
    """
    left = [schema]
    while left:
        node = left.pop()
        if not isinstance(node, Mapping):
            continue
        if reason := _of_node(node):
            return reason
        left.extend(_below(node))
    return ""


def _below(node: Mapping[str, Any]) -> Iterator[Any]:
    for name in _OF_ONE:
        yield node.get(name)
    for name in _OF_LISTS:
        if isinstance(found := node.get(name), list):
            yield from found
    for name in _OF_NAMES:
        if isinstance(found := node.get(name), Mapping):
            yield from found.values()


def _of_node(node: Mapping[str, Any]) -> str:
    for name in _NEVER:
        if name in node and node[name] is not False:
            return f"the grammar does not enforce {name}"
    deciding = next((each for each in _DECIDING if each in node), None)
    if deciding is not None:
        return _beside(node, deciding)
    if "propertyNames" in node and node.get("properties"):
        return "the grammar does not enforce propertyNames beside properties"
    for other in ("minLength", "maxLength", "format"):
        if "pattern" in node and other in node:
            return f"the grammar does not enforce {other} beside pattern"
        if "format" in node and other in node and other != "format":
            return f"the grammar does not enforce {other} beside format"
    for name, kind in _NEEDS_TYPE.items():
        implied = any(each in node for each in _IMPLY_TYPE.get(kind, ()))
        if name in node and "type" not in node and not implied:
            return f"the grammar does not enforce {name} without a type: add it"
    return _missing(node)


def _beside(node: Mapping[str, Any], deciding: str) -> str:
    for other in _CONSTRAINTS:
        if other in node and other != deciding:
            return f"the grammar does not enforce {other} beside {deciding}"
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
