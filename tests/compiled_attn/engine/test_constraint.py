"""Grammars in the engine: sampled tokens are allowed, whatever happens to others."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled_attn.engine import Engine, EngineConfig, SamplingParams
from compiled_attn.engine.constraint import Constraint, constrain
from compiled_attn.errors import ConfigError
from tests.compiled_attn.engine.small import small_engine
from tests.compiled_attn.engine.words import Word, Words, grammar_of, next_of
from tests.compiled_attn.tiny import tiny_model

LONG: list[Word] = [(5, 6, 7, 8, 9, 10), (5, 6, 7, 9, 9), (5, 6, 20, 21, 22, 23, 24), (30, 31, 32)]
PROMPTS = [[1, 2, 3], [4] * 9, [11, 12, 13, 14, 15]]
NEW = 9
END = 127


@pytest.fixture(scope="module")
def engine() -> Engine:
    return small_engine(grammars=Words())


def expected(words: list[Word], prompt: list[int], ends: set[int] = frozenset()) -> list[int]:
    """The greedy answer, by plain logits and the words."""
    model, made = tiny_model(), ()
    while True:
        allowed = next_of(words, made) | (ends if made in words else set())
        if not allowed - ends:
            return [*made]
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *made]])).logits[0, -1]
        made = (*made, max(sorted(allowed), key=lambda token: float(logits[token])))
        if made[-1] in ends:
            return [*made]


def test_tokens_behind_the_models_vocabulary_are_none_that_may_follow():
    words = [(5, 6), (5, 6, 150)]  # of a tokenizer that has more tokens than the model
    engine = small_engine(grammars=Words(vocab=200))
    assert engine.sizing.vocab < 150
    (answer,) = served(
        engine, SamplingParams(max_new_tokens=NEW, grammar=grammar_of(*words)), [[1]]
    )
    assert (answer.tokens, answer.finish_reason) == ([5, 6], "stop")


def served(engine: Engine, sampling, prompts=PROMPTS):
    return [*engine.generate(prompts, sampling, in_order=True)]


def test_the_answer_is_the_likeliest_one_that_is_allowed_and_ends_where_nothing_may_follow(engine):
    params = SamplingParams(max_new_tokens=NEW, grammar=grammar_of(*LONG))
    results = served(engine, params)
    assert [each.tokens for each in results] == [expected(LONG, prompt) for prompt in PROMPTS]
    assert {each.finish_reason for each in results} == {"stop"}


def test_an_end_token_may_come_where_the_text_may_end_and_only_there(engine):
    words = [(5,), (5, 6, 7), (5, 6, 7, 8)]
    for bias in (0, 50, -50):
        params = SamplingParams(
            max_new_tokens=NEW,
            grammar=grammar_of(*words),
            stop_token_ids=(END,),
            logit_bias={END: bias},
        )
        for result in served(engine, params):
            text = result.tokens[:-1] if result.tokens[-1] == END else result.tokens
            assert tuple(text) in words and result.finish_reason == "stop"
            if bias:
                assert len(result.tokens) == (2 if bias > 0 else 4)


def test_least_tokens_hold_an_end_back_but_no_grammar_that_is_over(engine):
    words = [(5,), (5, 6, 7), (5, 6, 7, 8)]
    params = SamplingParams(
        max_new_tokens=NEW,
        min_tokens=3,
        grammar=grammar_of(*words),
        stop_token_ids=(END,),
        logit_bias={END: 50},
    )
    assert {tuple(each.tokens) for each in served(engine, params)} == {(5, 6, 7, END)}
    over = SamplingParams(max_new_tokens=NEW, min_tokens=8, grammar=grammar_of((5, 6)))
    assert {tuple(each.tokens) for each in served(engine, over)} == {(5, 6)}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_a_grammar_are_bit_for_bit_as_without_the_others(engine, temperature):
    sampled = {"max_new_tokens": 6, "temperature": temperature, "seed": 4, "logprobs": 3}
    plain, five = SamplingParams(**sampled), SamplingParams(**sampled, logit_bias={5: 1e6})
    mine = SamplingParams(**sampled, grammar=grammar_of((5,) * 6))
    without = served(engine, [plain, five, plain])
    mixed = served(engine, [plain, mine, plain])
    assert mixed[1].tokens == without[1].tokens == [5] * 6
    for own, other in zip(mixed, without, strict=True):
        assert (own.tokens, own.logprobs) == (other.tokens, other.logprobs)


def test_log_probabilities_are_those_of_the_model_without_the_grammar(engine):
    params = SamplingParams(max_new_tokens=NEW, grammar=grammar_of((5, 6)), logprobs=1)
    result = served(engine, params)[0]
    with torch.no_grad():
        logits = tiny_model()(torch.tensor([[*PROMPTS[0], 5]])).logits[0, -2:]
    own = logits.log_softmax(-1)
    for at, each in enumerate(result.logprobs):
        assert each.logprob == pytest.approx(float(own[at, each.token]), abs=1e-4)
        assert each.top[0][0] == int(own[at].argmax())


def test_continuations_are_drawn_apart_within_the_grammar(engine):
    params = SamplingParams(
        max_new_tokens=NEW, temperature=3.0, seed=1, n=24, grammar=grammar_of(*LONG)
    )
    results = served(engine, params, PROMPTS[:1])
    assert {tuple(each.tokens) for each in results} <= set(LONG)
    assert len({tuple(each.tokens) for each in results}) > 1
    again = served(engine, params.continuation(7), PROMPTS[:1])
    assert again[0].tokens == results[7].tokens


def test_the_longest_answer_cuts_a_text_off(engine):
    params = SamplingParams(max_new_tokens=2, grammar=grammar_of(*LONG))
    result = served(engine, params)[0]
    assert len(result.tokens) == 2 and result.finish_reason == "length"


@pytest.mark.parametrize("what", ["accept", "completed", "allowed"])
def test_a_grammar_that_fails_ends_its_own_request_alone(what):
    grammars = Words()
    engine = small_engine(grammars=grammars)
    grammars.fails.add(what)
    good = SamplingParams(max_new_tokens=NEW, grammar=grammar_of(*LONG))
    bad = SamplingParams(max_new_tokens=NEW, grammar=grammar_of((1,), (1, 2, 3, 4)))
    results = served(engine, [good, bad, SamplingParams(max_new_tokens=NEW)])
    assert results[0].tokens == expected(LONG, PROMPTS[0])
    assert results[1].finish_reason == "error"
    assert results[1].error.endswith(f"RuntimeError: injected in {what}")
    assert results[2].finish_reason == "length"
    assert engine.report().failed_requests == 1 and engine.pool.stats().used == 0


def test_a_grammar_that_can_go_nowhere_ends_its_own_request_with_the_reason():
    engine = small_engine(grammars=Words(vocab=40))
    stuck = SamplingParams(max_new_tokens=NEW, grammar=grammar_of((5, 60)))
    good = SamplingParams(max_new_tokens=NEW, grammar=grammar_of(*LONG))
    first, second = served(engine, [stuck, good], PROMPTS[:2])
    assert first.tokens == [5] and "fix the grammar, which cannot continue here" in first.error
    assert second.tokens == expected(LONG, PROMPTS[1])


def test_a_grammar_needs_an_engine_that_knows_grammars():
    params = SamplingParams(grammar=grammar_of((5,)))
    engine = Engine(tiny_model(), EngineConfig(backend="eager", max_graphs=2))
    with pytest.raises(ConfigError, match="expected no grammar, as this engine has no tokenizer"):
        engine.submit([1], params)
    with pytest.raises(ValueError, match="expected grammar: None or a Grammar, got 'x'"):
        SamplingParams(grammar="x")


def test_one_that_cannot_be_compiled_is_refused_before_it_is_queued(engine):
    with pytest.raises(ConfigError, match="expected words"):
        engine.stream([[1]], SamplingParams(grammar=grammar_of(())))
    with pytest.raises(ConfigError, match="expected words"):
        engine.submit([1], SamplingParams(grammar=grammar_of(())))
    assert not engine.open_requests and not engine.has_work


def test_a_preempted_request_goes_on_where_it_was():
    words = [(*range(5, 20), last, last + 1) for last in (20, 30, 40)]
    params = SamplingParams(max_new_tokens=20, grammar=grammar_of(*words))
    prompts = [[at + 40] * 6 for at in range(4)]
    engine = small_engine(grammars=Words(), num_blocks=13)
    results = served(engine, params, prompts)
    assert engine.report().preemptions
    assert [each.tokens for each in results] == [expected(words, prompt) for prompt in prompts]


@given(
    st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4).map(tuple), min_size=1),
    st.sampled_from([40, 64, 70]),
    st.sampled_from([33, 64, 96]),
    st.integers(0, 3),
)
@settings(deadline=None, max_examples=60)
def test_a_mask_forbids_what_the_reference_does(words, vocab, known, count):
    start = words[0][:count]
    grammars, ends = Words(known), {3, 32, 200}
    logits = torch.randn(3, vocab)
    before = logits.clone()
    own = Constraint(grammars, grammar_of(*words), 2, ends)
    constrain(logits, [None, own, None], [(), (1, 1, *start), ()])
    assert torch.equal(logits[[0, 2]], before[[0, 2]])
    allowed = next_of(words, start) - ends | (ends if start in words else set())
    finite = logits[1].isfinite().nonzero()[:, 0].tolist()
    assert set(finite) == {token for token in allowed if token < vocab}
    assert torch.equal(logits[1, finite], before[1, finite])


def test_another_last_token_is_read_in_place_of_the_one_that_was_undone():
    own = Constraint(Words(), grammar_of(*LONG), 1, ())
    assert own.after([1, 5, 6, 7]).start == (5, 6, 7)
    assert own.after([1, 5, 6, 20, 21]).start == (5, 6, 20, 21)
    assert own.after([1, 5, 6]).start == (5, 6)
    with pytest.raises(ValueError, match="expected a token that the grammar allows, got 99"):
        own.after([1, 5, 99])
    assert own.after([1]).start == ()
    assert own.is_over([1, 30, 31, 32]) and not own.is_over([1, 30])
