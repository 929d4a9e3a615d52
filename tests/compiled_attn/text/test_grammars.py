"""Structured output by xgrammar: texts are judged by `re` and `json`, which know nothing of it."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

pytest.importorskip("xgrammar", reason="needs the extra 'grammar'")

from compiled_attn import LLM, AsyncEngine
from compiled_attn.engine import Grammar, SamplingParams
from compiled_attn.engine.asynchronous import Compiling
from compiled_attn.engine.constraint import Constraint, constrain
from compiled_attn.errors import ConfigError, QueueFull, RequestCancelled
from compiled_attn.text import Answer, Grammars, Tokenizer
from tests.compiled_attn.engine.drafting import draft_known

QUICK = settings(
    deadline=None,
    max_examples=60,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # to shrink takes minutes
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def walked(tokenizer: Tokenizer, grammar: Grammar, seed: int, most: int = 80) -> list[str]:
    """Texts of random logits, wider than the vocabulary, under a grammar: those that finished."""
    generator, grammars, texts = torch.Generator().manual_seed(seed), Grammars(tokenizer), []
    grammars.compiled(grammar)
    rows = [Constraint(grammars, grammar, 1, {262}) for _ in range(8)]
    tokens = [[0] for _ in rows]
    for _ in range(most):
        logits = torch.randn(len(rows), 300, generator=generator)
        constrain(logits, rows, tokens)
        chosen = logits.argmax(1).tolist()
        tokens = [[*before, token] for before, token in zip(tokens, chosen, strict=True)]
        over = [
            each[-1] == 262 or row.is_over(each) for row, each in zip(rows, tokens, strict=True)
        ]
        texts += [
            tokenizer.decode(each[1:]) for each, ends in zip(tokens, over, strict=True) if ends
        ]
        rows = [row for row, ends in zip(rows, over, strict=True) if not ends]
        tokens = [each for each, ends in zip(tokens, over, strict=True) if not ends]
        if not rows:
            break
    return texts


def answers(llm: LLM, grammar: Grammar, **more: Any) -> list[Answer]:
    """Three answers, sampled from nearly equal probabilities."""
    sampled = {"max_new_tokens": 24, "temperature": 3.0, "seed": 1, "n": 3, **more}
    return llm.generate(["the moon"], SamplingParams(grammar=grammar, **sampled))


def whole(given: list[Answer]) -> list[str]:
    """The texts of those that came to their end."""
    assert {each.result.finish_reason for each in given} <= {"stop", "length"}
    return [each.text for each in given if each.result.finish_reason == "stop"]


letters = st.sampled_from(["a", "b", "é", "[a-c]", r"[^\n]", r"\d", r"\.", " ", "on", "th"])
regexes = st.recursive(
    letters,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda two: f"(?:{two[0]}|{two[1]})"),
        st.tuples(inner, st.sampled_from(["?", "*", "+", "{2}", "{1,3}"])).map(
            lambda two: f"(?:{two[0]}){two[1]}"
        ),
    ),
    max_leaves=6,
)


@given(regexes, st.integers(0, 99))
@QUICK
def test_a_text_matches_its_regular_expression(llm, regex, seed):
    for text in walked(llm.tokenizer, Grammar.regex(regex), seed):
        assert re.fullmatch(regex, text), text


def test_a_text_ends_where_its_expression_does(llm):
    given = answers(llm, Grammar.regex("(?:yes|no)!?"), min_tokens=2)
    assert len(whole(given)) == 3
    assert {each.text for each in given} <= {"yes", "no", "yes!", "no!"}


leaves = st.sampled_from(
    [
        {"type": "integer", "minimum": 0, "maximum": 99},
        {"type": "boolean"},
        {"type": "null"},
        {"enum": ["on", "off", 5]},
        {"type": "string", "maxLength": 4},
        {"type": "string", "pattern": "^[ab]{1,3}$"},
    ]
)
schemas = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.fixed_dictionaries(
            {"type": st.just("array"), "items": inner, "maxItems": st.integers(1, 2)}
        ),
        st.dictionaries(st.sampled_from("xyz"), inner, min_size=1, max_size=2).map(
            lambda each: {"type": "object", "properties": each, "required": [*each][:1]}
        ),
    ),
    max_leaves=4,
)


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a value is one of a schema of those above."""
    if "enum" in schema:
        return value in schema["enum"]
    kind = schema["type"]
    if kind == "integer":
        return type(value) is int and 0 <= value <= 99
    if kind == "string":
        pattern = schema.get("pattern", "(?s)^.{0,4}$")
        return isinstance(value, str) and bool(re.search(pattern, value))
    if kind == "array":
        return (
            isinstance(value, list)
            and len(value) <= schema["maxItems"]
            and all(fits(each, schema["items"]) for each in value)
        )
    if kind == "object":
        return (
            isinstance(value, dict)
            and set(schema["required"]) <= value.keys() <= schema["properties"].keys()
            and all(fits(each, schema["properties"][name]) for name, each in value.items())
        )
    return value is None if kind == "null" else isinstance(value, bool)


@given(schemas, st.integers(0, 99))
@QUICK
def test_json_fits_its_schema(llm, schema, seed):
    for text in walked(llm.tokenizer, Grammar.json_schema(schema), seed):
        assert fits(json.loads(text), schema), text


def test_any_json_object_is_an_object(llm):
    texts = whole(answers(llm, Grammar.json_object(), max_new_tokens=60, logit_bias=_closing(llm)))
    assert texts and all(isinstance(json.loads(text), dict) for text in texts)


def _closing(llm: LLM) -> dict[int, float]:
    """Makes what ends strings and objects likely."""
    return {llm.tokenizer.encode(sign)[0]: 40.0 for sign in '"}'}


def test_drafts_change_no_structured_text(llm, model_dir, config):
    schema = {
        "type": "object",
        "properties": {"on": {"enum": ["moon", None]}, "x": {"type": "integer"}},
    }
    grammars = Grammar.json_schema(schema), Grammar.regex("(on|off)( the moon){3}"), None
    params = [
        SamplingParams(max_new_tokens=40, grammar=grammar, temperature=temperature, seed=1)
        for grammar in grammars
        for temperature in (0.0, 2.0)
    ]
    prompts = ["the moon is on the moon"] * len(params)
    expected = llm.generate(prompts, params)
    drafting = LLM(model_dir, replace(config, speculate="ngram:4", max_graphs=12))
    draft_known(drafting.engine, [each.result for each in expected], 0.2)
    for _ in range(2):
        texts = [each.text for each in drafting.generate(prompts, params)]
        assert texts == [each.text for each in expected]
    report = drafting.engine.report()
    drafted, accepted = (sum(report.drafts[kind]) for kind in ("drafted", "accepted"))
    assert 50 < accepted < drafted and report.prefix_hit_ratio > 0.3
    drafting.close()


def test_rules_derive_the_text(llm):
    rules = 'root ::= "(" root ")" | "x"'
    texts = whole(answers(llm, Grammar.ebnf(rules)))
    assert texts
    for text in texts:
        depth = text.count("(")
        assert text == "(" * depth + "x" + ")" * depth


def test_a_text_is_never_of_special_tokens_nor_of_ids_without_text(llm):
    given = answers(llm, Grammar.regex("<end>(?:.|\n){20}"), max_new_tokens=60)
    assert llm.model.config.vocab_size > len(llm.tokenizer.of_transformers)
    for each in given:
        assert each.text.startswith("<end>") and not llm.tokenizer.special & {*each.result.tokens}
        assert max(each.result.tokens) < len(llm.tokenizer.of_transformers)


def test_the_pieces_of_a_stream_are_the_text(llm):
    params = SamplingParams(max_new_tokens=30, grammar=Grammar.regex("(?:ä|½|moon ){3,5}"))
    text = "".join(llm.stream("the moon", params))
    assert re.fullmatch("(?:ä|½|moon ){3,5}", text)
    assert llm.generate(["the moon"], params)[0].text == text


def test_a_stop_string_ends_a_text_before_its_grammar_does(llm):
    given = answers(llm, Grammar.regex("ab{30}"), stop="bbb")
    assert {each.text for each in given} == {"a"}


def test_bytes_for_what_has_no_token_are_text_too(tokenizer):
    matcher = Grammars(tokenizer).compiled(Grammar.regex("é+a"))()
    for token in tokenizer.of_transformers("éa", add_special_tokens=False).input_ids:
        if tokenizer.decode([token]).strip():
            assert matcher.accept_token(token)
    assert matcher.is_completed()


def test_many_threads_compile_a_grammar_once_and_get_their_answers(llm, monkeypatch):
    grammars, made = Grammars(llm.tokenizer), []
    own = Grammars._make_compilers

    def counted(self: Grammars) -> Any:
        made.append(own(self))
        return made[-1]

    monkeypatch.setattr(Grammars, "_make_compilers", counted)
    grammar, bytes_of = Grammar.json_schema({"enum": ["on", "off"]}), []

    def compile_it() -> None:
        grammars.compiled(grammar)
        bytes_of.append(made[0]["json_schema"].get_cache_size_bytes())

    threads = [threading.Thread(target=compile_it) for _ in range(16)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    grammars.compiled(Grammar.json_schema({"enum": ["on", "off"]}))
    assert len(made) == 1 and {*bytes_of} == {made[0]["json_schema"].get_cache_size_bytes()}


def test_an_asynchronous_engine_refuses_at_submit_and_serves_the_rest(llm):
    prompt = llm.tokenizer.encode("the moon")
    with AsyncEngine(llm.engine) as serving:
        with pytest.raises(ConfigError, match="that xgrammar takes"):
            serving.submit(prompt, SamplingParams(grammar=Grammar.regex("(")))
        params = [SamplingParams(grammar=Grammar.regex(f"{'a' * n}b")) for n in range(1, 9)]
        results = [handle.result() for handle in [serving.submit(prompt, p) for p in params]]
    assert [llm.tokenizer.decode(each.tokens) for each in results] == [
        "a" * n + "b" for n in range(1, 9)
    ]


def test_an_event_loop_does_not_wait_for_a_grammar(llm, monkeypatch):
    prompt, may_go = llm.tokenizer.encode("the moon"), threading.Event()
    own = llm.grammars.compiled

    def slow(grammar: Grammar) -> Any:
        if threading.current_thread().name == "grammar":
            may_go.wait()
        return own(grammar)

    monkeypatch.setattr(llm.grammars, "compiled", slow)

    async def main(serving: AsyncEngine) -> None:
        texts = [Grammar.regex(text) for text in ("abc", "(", "abcd")]
        good, bad, dropped = [serving.submit(prompt, SamplingParams(grammar=g)) for g in texts]
        assert len((await serving.submit(prompt, SamplingParams(max_new_tokens=2))).tokens) == 2
        dropped.cancel()
        with pytest.raises(RequestCancelled):
            await dropped
        assert not (good.has_finished or bad.has_finished)
        may_go.set()
        assert llm.tokenizer.decode((await good).tokens) == "abc"
        with pytest.raises(ConfigError, match="parenthesis is not closed"):
            await bad
        may_go.clear()
        waits = serving.submit(prompt, SamplingParams(grammar=Grammar.regex("cab")))
        threading.Timer(0.1, may_go.set).start()
        await asyncio.to_thread(serving.stop)  # serves what waits
        assert llm.tokenizer.decode((await waits).tokens) == "cab"

    asyncio.run(main(AsyncEngine(llm.engine)))


def test_grammars_that_wait_beyond_measure_are_refused(llm, monkeypatch):
    may_go = threading.Event()
    monkeypatch.setattr(llm.grammars, "compiled", lambda grammar: may_go.wait())
    with AsyncEngine(llm.engine) as serving:
        begun = [serving.compiled(Grammar.regex("a" * n)) for n in range(1, 17)]
        assert serving.compiled(Grammar.regex("a")) is begun[0]
        with pytest.raises(QueueFull, match="at most 16 grammars that wait"):
            serving.compiled(Grammar.regex("b"))
        may_go.set()
        assert all(each.result() is None for each in begun)
        assert serving.compiled(Grammar.regex("b")).result() is None


def test_a_grammar_that_no_thread_could_begin_is_begun_by_the_next_request(monkeypatch):
    compiling = Compiling(SimpleNamespace(compiled=lambda grammar: None))
    grammar = Grammar.regex("a")
    with monkeypatch.context() as no_threads:
        no_threads.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("no thread")))
        with pytest.raises(RuntimeError, match="no thread"):
            compiling.begin(grammar)
    assert compiling.begin(grammar).result(10) is None


@pytest.mark.parametrize("more", [{}, {"ignore_eos": True}, {"min_tokens": 3}])
def test_the_empty_text_alone_is_no_grammar(llm, more):
    for empty in (Grammar.regex(""), Grammar.ebnf('root ::= ""')):
        with pytest.raises(ConfigError, match="only the empty text fits it"):
            answers(llm, empty, **more)


def test_without_xgrammar_only_what_asks_for_it_is_refused(llm, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "xgrammar", None)
    with pytest.raises(ConfigError, match=r"pip install .*\[grammar\]"):
        Grammars(llm.tokenizer).compiled(Grammar.regex("a"))
    assert llm.generate(["the moon"], SamplingParams(max_new_tokens=2))[0].text is not None


def test_a_tokenizer_that_xgrammar_cannot_read_is_named(model_dir, monkeypatch):
    tokenizer = Tokenizer(model_dir)
    monkeypatch.setattr(type(tokenizer.of_transformers), "get_vocab", lambda _: {})
    with pytest.raises(ConfigError, match="xgrammar cannot read its tokenizer"):
        Grammars(tokenizer).compiled(Grammar.regex("a"))
