"""Which keywords are refused, and that xgrammar enforces the ones that are not."""

from __future__ import annotations

import json

import pytest

from compiled_attn.text.schema_keywords import unenforced

xgrammar = pytest.importorskip("xgrammar", reason="needs the extra 'grammar'")

INTEGER, TEXT = {"type": "integer"}, {"type": "string"}
REFUSED = {
    "multipleOf": {"type": "number", "multipleOf": 5},
    "not": {"type": "string", "not": {"const": "a"}},
    "uniqueItems": {"type": "array", "items": INTEGER, "uniqueItems": True},
    "if": {"type": "object", "if": {"required": ["a"]}, "then": {"required": ["b"]}},
    "else": {"type": "object", "else": {"required": ["b"]}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {"type": "object", "dependentSchemas": {"a": {}}},
    "contains": {"type": "array", "contains": INTEGER},
    "propertyNames": {
        "type": "object",
        "properties": {"a": INTEGER},
        "propertyNames": {"enum": ["b"]},
    },
    "minProperties": {"minProperties": 1},
    "minimum": {"minimum": 5},
    "maxLength": {"type": "string", "pattern": "^a+$", "maxLength": 2},
    "allOf": {"allOf": [INTEGER, {"type": "integer", "minimum": 5}]},
    "properties": {"type": "object", "properties": {"a": INTEGER}, "anyOf": [{"type": "object"}]},
    "required": {"type": "object", "properties": {"a": INTEGER}, "required": ["b"]},
}
# Schema, what it forbids, what it allows.
ENFORCED = [
    ({"type": "object", "minProperties": 1, "additionalProperties": INTEGER}, {}, {"a": 1}),
    (
        {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}, "minProperties": 1},
        {},
        {"a": 1},
    ),
    ({"type": "object", "additionalProperties": INTEGER, "maxProperties": 1}, {"a": 1, "b": 1}, {}),
    ({"type": "object", "patternProperties": {"^a$": INTEGER}}, {"a": "x"}, {"a": 1}),
    ({"type": "object", "propertyNames": {"pattern": "^a$"}}, {"b": 1}, {"a": 1}),
    ({"type": "array", "items": INTEGER, "minItems": 2}, [1], [1, 2]),
    ({"type": "array", "items": INTEGER, "maxItems": 1}, [1, 2], [1]),
    ({"type": "number", "exclusiveMinimum": 5.5}, 5.5, 5.6),
    ({"type": ["integer", "null"], "minimum": 5}, 4, 5),
    ({"type": "string", "minLength": 2, "maxLength": 2}, "abc", "ab"),
    ({"properties": {"a": INTEGER}, "required": ["a"]}, {}, {"a": 1}),
    ({"$defs": {"x": INTEGER}, "$ref": "#/$defs/x"}, "a", 1),
]


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("within", [False, True])
def test_a_keyword_that_is_not_enforced_is_named(name, within):
    schema = REFUSED[name]
    if within:
        schema = {"type": "object", "properties": {"p": {"type": "array", "items": schema}}}
    assert f"not enforce {name}" in unenforced(schema)


def test_names_of_properties_and_values_are_no_keywords():
    names = {name: TEXT for name in (*REFUSED, "then")}
    assert not unenforced({"type": "object", "properties": names, "required": ["not"]})
    assert not unenforced({"enum": [{"not": 1}], "default": {"if": 1}})
    assert not unenforced({"const": {"uniqueItems": True}, "description": "contains"})


@pytest.mark.parametrize(("schema", "bad", "good"), ENFORCED)
def test_a_keyword_that_is_let_through_is_enforced(schema, bad, good):
    assert not unenforced(schema)
    assert accepts(schema, good) and not accepts(schema, bad)


def accepts(schema: object, value: object) -> bool:
    texts = [bytes([each]) for each in range(256)]
    vocabulary = xgrammar.TokenizerInfo(texts, xgrammar.VocabType.RAW, stop_token_ids=[])
    grammar = xgrammar.GrammarCompiler(vocabulary).compile_json_schema(json.dumps(schema))
    matcher = xgrammar.GrammarMatcher(grammar)
    return all(map(matcher.accept_token, json.dumps(value).encode())) and matcher.is_completed()
