"""Engines with drafts yield the tokens of engines without, and count what became of the drafts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled_attn.engine import Engine, SamplingParams
from compiled_attn.engine.request_state import RequestState
from compiled_attn.engine.speculation.drafter import Drafter, Ngrams
from compiled_attn.step import StepLimits, TableLayout
from compiled_attn.testing.fuzz.drafts import FreeRows
from tests.compiled_attn.engine.drafting import draft_known, drafting_engine
from tests.compiled_attn.engine.small import greedy, plain, prompts_of, small_engine
from tests.compiled_attn.engine.test_stop_strings import has_stop, spelled
from tests.compiled_attn.engine.words import Words, grammar_of
from tests.compiled_attn.tiny import tiny_model
from tests.fake_device import open_device
from tests.slow import slow_but

PROMPTS = prompts_of(12, longest=30)
GREEDY = [SamplingParams(max_new_tokens=25)] * len(PROMPTS)
MIXED = [
    SamplingParams(max_new_tokens=20, **each)
    for each in (
        {},
        {"temperature": 1.0, "seed": 1},
        {"temperature": 0.7, "seed": 2, "top_k": 9, "top_p": 0.9, "min_p": 0.01},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.2},
        {"temperature": 1.2, "seed": 3, "frequency_penalty": 1.0, "logit_bias": {5: 3.0}},
        {"logprobs": 2},
        {"temperature": 1.0, "seed": 4, "logprobs": 0, "prompt_logprobs": 1},
        {"min_tokens": 9, "stop_token_ids": tuple(range(0, 128, 3))},
        {"stop_token_ids": tuple(range(0, 128, 9)), "temperature": 1.0, "seed": 5},
        {"grammar": grammar_of(tuple(range(40, 53)), (7, 8, 9, 7, 8, 9, 7, 8), (7, 8, 3))},
        {"grammar": grammar_of((1,) * 17, (1,) * 5 + (2,) * 9), "temperature": 1.5, "seed": 6},
        {"logit_bias": {3: 90.0}},
    )
]


def results_of(engine: Engine, params=GREEDY):
    return [*engine.generate(PROMPTS, params, in_order=True)]


def figures(results):
    """Everything but the times."""
    return [
        (each.tokens, each.finish_reason, each.error,
         [(one.token, [at for at, _ in one.top]) for one in each.logprobs or ()])
        for each in results
    ]  # fmt: skip


def check_logprobs(results, expected):
    for result, other in zip(results, expected, strict=True):
        for one, two in zip(result.logprobs or (), other.logprobs or (), strict=True):
            assert one.logprob == pytest.approx(two.logprob, abs=1e-4)


@pytest.fixture(scope="module")
def mixed():
    engine = small_engine(grammars=Words())
    return results_of(engine, MIXED)


@pytest.mark.parametrize(
    ("wrong", "config"),
    [
        (0.0, {}),
        (0.3, {"num_blocks": 22}),
        (0.3, {"sanitize": True, "defrag_waste": 0.0}),
        (1.0, {}),
    ],
    ids=["right", "preempted", "sanitized", "wrong"],
)
def test_tokens_of_all_settings_are_those_without_drafts(mixed, wrong, config):
    engine = drafting_engine(mixed, wrong, grammars=Words(), **config)
    results = results_of(engine, MIXED)
    assert figures(results) == figures(mixed)
    check_logprobs(results, mixed)
    report = engine.report()
    drafted, accepted = (report.drafts[kind] for kind in ("drafted", "accepted"))
    assert sum(drafted) > 20 and all(a <= d for a, d in zip(accepted, drafted, strict=True))
    assert drafted == sorted(drafted, reverse=True) and accepted == sorted(accepted, reverse=True)
    assert (sum(accepted) == 0) == (wrong == 1.0) and (wrong or report.steps < 120)
    assert report.generated_tokens == sum(len(each.tokens) for each in mixed)
    assert report.compiles_after_warmup == report.restarts == engine.pool.stats().used == 0
    assert report.preemptions or "num_blocks" not in config
    assert report.prefix_hit_ratio > 0.1


@pytest.mark.parametrize("backend", slow_but(["aot_eager"], ["aot_eager", "inductor"]))
def test_captured_graphs_serve_drafts_without_another_compile(backend):
    expected = results_of(small_engine())
    engine = drafting_engine(expected, 0.2, backend=backend)
    assert figures(results_of(engine)) == figures(expected)
    report = engine.report()
    assert report.compiles_after_warmup == 0 and sum(report.drafts["accepted"]) > 50


@pytest.mark.parametrize("wrong", [0.0, 0.4])
def test_steps_that_compute_prompts_check_drafts_too(wrong):
    """Prompts of several steps arrive one after the other, one of them scored."""
    prompts = prompts_of(12, seed=1, longest=90)
    params = [SamplingParams(max_new_tokens=25), *MIXED[1:7] * 2][:12]
    config = {"max_seqs": 8, "num_blocks": 200, "grammars": Words()}
    expected = [*small_engine(**config).generate(prompts, params, concurrency=4, in_order=True)]
    engine = drafting_engine(expected, wrong, sanitize=True, **config)
    mixed = 0

    def on_step(info):
        nonlocal mixed
        record = info.step
        rows = record.need["requests"]
        mixed += bool(record.drafts) and record.need["tokens"] > rows

    results = engine.generate(prompts, params, concurrency=4, in_order=True, on_step=on_step)
    assert figures([*results]) == figures(expected)
    report = engine.report()
    assert mixed > 10 and sum(report.drafts["accepted"]) > 20
    assert report.cut_steps == report.compiles_after_warmup == report.restarts == 0


def test_events_say_which_tokens_were_drafted():
    expected = results_of(small_engine())
    engine = drafting_engine(expected, 0.2)
    places, steps = [0] * 5, []
    stream = engine.stream(PROMPTS, GREEDY, on_step=lambda info: steps.append(info.step))
    of_requests = dict.fromkeys(range(len(PROMPTS)), 0)
    for event in stream:
        places[event.draft] += 1
        of_requests[event.index] += event.draft > 0
        if event.result is not None:
            assert event.result.accepted_tokens == of_requests[event.index]
    report = engine.report()
    assert places[1:] == report.drafts["accepted"] and sum(places) == report.generated_tokens
    pairs = [pair for step in steps for pair in step.drafts]
    assert sum(drafted for drafted, _ in pairs) == sum(report.drafts["drafted"])


def test_the_text_ends_inside_a_draft():
    model = tiny_model()
    (tokens,) = plain(model, [PROMPTS[0]], 12)
    stop = spelled(tokens[4:7])[:-1]
    end = next(n for n in range(1, 13) if has_stop(tokens[:n], (stop,)))
    params = [SamplingParams(max_new_tokens=12, stop=stop), SamplingParams(max_new_tokens=end)]
    params += [SamplingParams(max_new_tokens=12, stop_token_ids=(tokens[end - 1],))]
    for each in params:
        engine = small_engine(model, speculate="ngram:4", max_graphs=16)
        engine._has_stop = has_stop
        draft_known(engine, [replace_tokens(PROMPTS[0], tokens)], 0.0)
        (result,) = engine.generate([PROMPTS[0]], each)
        first = tokens[: tokens.index(tokens[end - 1]) + 1] if each.stop_token_ids else tokens[:end]
        assert result.tokens == first and engine.pool.stats().used == 0
        assert engine.report().drafts["accepted"][0] and engine.report().steps < len(first)


def replace_tokens(prompt, tokens):
    (result,) = small_engine().generate([prompt], SamplingParams(max_new_tokens=1))
    return replace(result, index=0, tokens=tokens)


@settings(deadline=None, max_examples=10)
@given(st.integers(0, 2**32), st.sampled_from([0.1, 0.5]))
def test_aborts_exceptions_and_shared_prefixes_change_no_token(seed, wrong):
    engine, expected = FUZZED()
    draft_known(engine, [], wrong)
    rng, received, names = np.random.default_rng(seed), {}, {}
    commit = engine.scheduler.commit

    def failing(step):
        if rng.random() < 0.05:
            raise KeyboardInterrupt
        commit(step)

    engine.scheduler.commit = failing
    order = rng.permutation(len(PROMPTS)).tolist()
    while order or engine.has_work:
        if order and rng.random() < 0.5:
            at = order.pop()
            name = engine.submit(PROMPTS[at], GREEDY[0])
            names[name] = at
            engine._drafter._source.texts[name] = [*PROMPTS[at], *expected[at]]
        if rng.random() < 0.05 and engine.open_requests:
            engine.abort(min(engine.open_requests))
        try:
            events = engine.step()
        except KeyboardInterrupt:
            events = engine.take_events()
        for event in events:
            received.setdefault(event.request_id, []).append(event.token)
            if event.result is not None:
                assert (
                    event.result.tokens
                    == received[event.request_id]
                    == expected[names[event.request_id]]
                )
    for name, tokens in received.items():
        assert tokens == expected[names[name]][: len(tokens)]
    assert engine.pool.stats().used == 0


class _Fuzzed:
    """One engine for all examples, as its warmup takes longest."""

    made: tuple[Engine, list[list[int]]] | None = None

    def __call__(self):
        if self.made is None:
            expected = greedy(small_engine(), PROMPTS, 25)
            engine = drafting_engine([], 0.0, num_blocks=26, sanitize=True)
            self.made = engine, expected
            self.commit = engine.scheduler.commit
        self.made[0].scheduler.commit = self.commit
        return self.made


FUZZED = _Fuzzed()


@pytest.mark.parametrize("params", [GREEDY, MIXED[1:3] * 6], ids=["greedy", "random"])
def test_a_device_drafts_and_schedules_ahead_in_turn(params):
    open_device()
    expected = results_of(small_engine(), params)
    engine = drafting_engine(expected, 0.3, tiny_model().to("fake_device"))
    assert figures(results_of(engine, params)) == figures(expected)
    assert sum(engine.report().drafts["accepted"]) > 20
    draft_known(engine, [], 0.0)
    assert figures(results_of(engine, params)) == figures(expected)
    assert engine.report().steps_ahead > 20


class Ones:
    """Drafts ones for every request."""

    seconds_per_token = 0.0

    def kind(self, sequence, state):
        return 1

    def drafts(self, lengths):
        return {each: [1] * count for each, count in lengths.items()}


def test_refused_drafts_become_rare_and_accepted_ones_come_back():
    params = SamplingParams(max_new_tokens=10**6)
    requests = [RequestState(n, [0] * 4, 4, params, 0.0, computed=3) for n in range(4)]
    buckets = TableLayout(100, 4, 10).ladder(StepLimits(64, 8, 10, 99, 4), 24)
    drafter = Drafter(Ones(), 4)
    drafter._costs = FreeRows(buckets, {})

    def drafted(steps: int, share: int) -> int:
        count = 0
        for _ in range(steps):
            drafts = drafter.draft(requests, 60)
            sizes = {each: (len(draft), share * len(draft)) for each, draft in drafts.items()}
            drafter.add(buckets.largest, 1.0, sizes)
            count += sum(size for size, _ in sizes.values())
        return count

    assert drafted(200, 0) >= 16
    assert 0 < drafted(1000, 0) < 0.03 * 1000 * 4
    assert drafted(300, 1) and drafted(100, 1) == 100 * 4 * 4


def test_prompts_that_repeat_themselves_are_continued_from_their_own_text():
    """A model whose next token follows from the last one repeats itself after a while."""
    model = tiny_model(max_position_embeddings=512)
    engine = small_engine(model, speculate="ngram:4", max_graphs=16, num_blocks=200)
    draft_known(engine, [], 0.0)
    engine._drafter._source = Ngrams()
    prompts = [PROMPTS[0] * 3, PROMPTS[1]]
    assert greedy(engine, prompts, 150) == plain(model, prompts, 150)
    report = engine.report()
    assert report.drafts["drafted"][0] > 0
