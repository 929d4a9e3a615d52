"""Grammars that are refused with a reason, and large ones that are not."""

from __future__ import annotations

import pytest

pytest.importorskip("xgrammar", reason="needs the extra 'grammar'")

from compiled_attn.engine import Grammar, SamplingParams
from compiled_attn.errors import ConfigError

REFUSED = {
    "half a group": (Grammar.regex("(a"), "regular expression", "parenthesis is not closed"),
    "a lookahead": (Grammar.regex("(?=a)b"), "regular expression", "not supported"),
    "no type": (Grammar.json_schema({"type": "moon"}), "JSON schema", 'Unsupported type "moon"'),
    "nothing": (Grammar.json_schema("false"), "JSON schema", "cannot accept any value"),
    "no root": (Grammar.ebnf('x ::= "a"'), "EBNF grammar", '"root" is not found'),
    "no way out": (Grammar.ebnf('root ::= root "a"'), "EBNF grammar", "no token of the model"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_xgrammar_refuses_is_one_line_and_the_engine_goes_on(llm, name):
    grammar, kind, reason = REFUSED[name]
    with pytest.raises(
        ConfigError, match=f"^expected a {kind} that xgrammar takes, got "
    ) as raised:
        llm.generate(["the moon"], SamplingParams(grammar=grammar))
    assert reason in str(raised.value) and "\n" not in str(raised.value)
    assert "cpp" not in str(raised.value)
    assert not llm.engine.open_requests
    given = llm.generate(["the moon"], SamplingParams(grammar=Grammar.regex("a"), max_new_tokens=4))
    assert given[0].text == "a"


@pytest.mark.parametrize("given", ["{", "5", [1], {"a": {1}}, {1: float}])
def test_what_is_no_schema_is_refused_when_the_grammar_is_made(given):
    with pytest.raises(ValueError, match=r"^expected a JSON schema"):
        Grammar.json_schema(given)
    with pytest.raises(ValueError, match="expected a grammar of valid text"):
        Grammar.regex("\ud800")
    with pytest.raises(ValueError, match="expected a grammar of valid text"):
        Grammar.ebnf(5)


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        (Grammar.json_schema('{"items": ' * 65 + "{}" + "}" * 65), "more than 64 levels"),
        (Grammar.json_schema({"enum": ["x" * 70_000]}), "more than 65,536"),
        (Grammar.regex("(" * 65 + "a" + ")" * 65), "more than 64 levels"),
        (Grammar.regex("[ab]{9999}" * 5), "it has 1,285 places .* more than 1,024"),
        (Grammar.regex("." * 1025), "it has 1,025 places"),
        (Grammar.ebnf("root ::= " + "[ab]? " * 1100), "it has 1,100 places"),
        (Grammar.json_schema({"pattern": "[ab]*" * 1100}), "it has 1,100 places"),
        (Grammar.json_schema({"patternProperties": {"." * 1100: {}}}), "it has 1,100 places"),
        (Grammar.json_schema({"items": [{"maxLength": 9**99}] * 5}), "it has 1,280 places"),
    ],
)
def test_what_would_take_too_long_to_compile_is_refused(llm, grammar, why):
    with pytest.raises(ConfigError, match=why):
        llm.generate(["the moon"], SamplingParams(grammar=grammar))


def test_brackets_in_strings_and_escapes_are_no_levels(llm):
    for grammar in (Grammar.json_schema({"const": "[" * 100}), Grammar.regex(r"\(" * 80)):
        llm.engine.submit([1, 2], SamplingParams(grammar=grammar, max_new_tokens=1))
    while llm.engine.has_work:
        llm.engine.step()


@pytest.mark.parametrize(
    "schema",
    [
        {"$defs": {"a0": {}, **{f"a{n}": {"$ref": f"#/$defs/a{n - 1}"} for n in range(1, 900)}},
         "$ref": "#/$defs/a899"},
        {"type": "array", "items": {"type": "integer"}, "minItems": 10**6},
        {"type": "string", "maxLength": 10**6},
        {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(300)}},
    ],
)  # fmt: skip
def test_chains_of_references_and_large_numbers_are_taken(llm, schema):
    assert llm.grammars.compiled(Grammar.json_schema(schema))().is_completed() is False
