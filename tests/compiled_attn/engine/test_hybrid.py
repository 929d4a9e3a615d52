"""An engine of a model with recurrent states: its tokens are those of each text alone.

The oracle computes each text at once in float64. Slots and blocks hold NaN until they are written,
and are never cleared.
"""

from __future__ import annotations

import random

import pytest
import torch

from compiled_attn.engine import SamplingParams
from tests.compiled_attn.engine.recurrent import BLOCK, NAN_TOKEN, Recurrent, recurrent_engine
from tests.compiled_attn.engine.small import greedy, prompts_of, rest_of
from tests.slow import slow_but

MODEL = Recurrent()


@pytest.fixture(autouse=True)
def one_thread():
    """The tensors are too small to be divided among threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def expected(prompts, count):
    return [MODEL.tokens_of(prompt, count) for prompt in prompts]


def prompts(count, seed=0, longest=60):
    return prompts_of(count, seed, longest, vocab=NAN_TOKEN)


def check_settled(engine):
    """No request has a block or a slot, nothing is pinned, and no slot is lost."""
    states = engine.pool.states
    assert engine.pool.num_used == 0
    assert len(states._free) == states.num_slots - 1 - states.num_snapshots - len(states._withdrawn)
    assert not states._slot_of and not states._restores


@pytest.mark.parametrize("step", [1, 5, 16, 64])
def test_chunks_and_mixed_steps_give_the_tokens_of_each_text_alone(step):
    engine = recurrent_engine(max_tokens_per_step=max(step, 4), max_seqs=min(step, 4))
    texts = prompts(9)
    assert greedy(engine, texts, 7) == expected(texts, 7)
    check_settled(engine)


def test_prefixes_continue_from_snapshots():
    engine = recurrent_engine(max_seqs=1, snapshots=4)
    start = list(range(1, 25))
    texts = [[*start, 30, last] for last in (1, 2, 3)] + [[*start[:13], 5]]
    results = [*engine.generate(texts, SamplingParams(max_new_tokens=5), in_order=True)]
    assert [each.tokens for each in results] == expected(texts, 5)
    assert [each.cached_tokens for each in results] == [0, 24, 24, 8]
    states = engine.report().states
    assert states["restored"] == 3 and states["stored"] == 4
    assert states["slots"] == 6 and states["bytes"] == 6 * states["bytes_per_slot"]


def test_without_memory_for_snapshots_nothing_is_shared_and_chunks_are_whole_steps():
    engine = recurrent_engine(max_seqs=1, snapshots=0)
    texts = [[*range(1, 25), last] for last in (1, 2)]
    assert greedy(engine, texts, 3) == expected(texts, 3)
    assert engine.executor.chunks[:3] == [(0, 16), (16, 9), (25, 1)]
    assert engine.report().states["saved"] == engine.report().prefix_hit_ratio == 0


def test_a_chunk_ends_at_a_border():
    engine = recurrent_engine(max_seqs=1, every=3)
    assert greedy(engine, [[*range(1, 31)]], 1) == expected([[*range(1, 31)]], 1)
    assert engine.executor.chunks == [(0, 12), (12, 12), (24, 6)]


@pytest.mark.parametrize("blocks", [13, 20])
def test_preempted_requests_are_computed_again(blocks):
    engine = recurrent_engine(num_blocks=blocks, context=48)
    texts = prompts(10, longest=20)
    assert greedy(engine, texts, 12) == expected(texts, 12)
    assert engine.scheduler.preemptions > 0
    check_settled(engine)


def test_each_continuation_of_a_prompt_has_states_of_its_own():
    engine = recurrent_engine(snapshots=4)
    prompt = prompts(2)[1]
    stream = engine.stream([prompt], SamplingParams(max_new_tokens=6, n=2))
    tokens = {}
    for event in stream:
        tokens.setdefault(event.choice, []).append(event.token)
    assert tokens == dict.fromkeys((0, 1), MODEL.tokens_of(prompt, 6))


@pytest.mark.parametrize("steps", range(6))
def test_an_abort_frees_slots_and_pending_copies(steps):
    engine = recurrent_engine(snapshots=2)
    texts = prompts(6, longest=30)
    greedy(engine, texts[:2], 3)
    ids = [engine.submit(text, SamplingParams(max_new_tokens=8)) for text in texts]
    for _ in range(steps):
        engine.step()
    for each in ids[::2]:
        if each in engine.open_requests:
            engine.abort(each)
    engine.take_events()
    rest_of(engine)
    check_settled(engine)
    assert greedy(engine, texts, 8) == expected(texts, 8)


@pytest.mark.parametrize("when", [0, 1, 4, 9])
@pytest.mark.parametrize("is_written", [False, True])
def test_a_failed_step_is_rolled_back(when, is_written, monkeypatch):
    engine = recurrent_engine()
    launch, at = engine.executor.launch, engine.executor.launches + when

    def fails(step):
        if engine.executor.launches != at:
            return launch(step)
        engine.executor.launches += 1
        if is_written:
            launch(step)
        raise OSError("lost")

    monkeypatch.setattr(engine.executor, "launch", fails)
    texts = prompts(5)
    ids = [engine.submit(text, SamplingParams(max_new_tokens=6)) for text in texts]
    tokens = {each: [] for each in ids}
    failures = 0
    while engine.has_work:
        try:
            events = engine.step()
        except OSError:
            failures += 1
            events = engine.take_events()
        for event in events:
            tokens[event.request_id].append(event.token)
    assert [*tokens.values()] == expected(texts, 6)
    assert failures == engine.restarts == 1
    check_settled(engine)


def test_a_request_with_nan_harms_no_other():
    engine = recurrent_engine(snapshots=4)
    texts = prompts(8, longest=40)
    for at in (2, 5):
        texts[at].insert(len(texts[at]) // 2, NAN_TOKEN)
    results = [*engine.generate(texts, SamplingParams(max_new_tokens=6), in_order=True)]
    failed = [at for at, each in enumerate(results) if each.finish_reason == "error"]
    assert failed == [2, 5]
    for text, result in zip(texts, results, strict=True):
        if NAN_TOKEN not in text:
            assert result.tokens == MODEL.tokens_of(text, 6)
    check_settled(engine)
    sound = [text for text in texts if NAN_TOKEN not in text]
    assert greedy(engine, sound, 6) == expected(sound, 6)


def test_a_step_that_would_continue_from_other_states_is_refused_and_rolled_back(monkeypatch):
    engine = recurrent_engine(max_seqs=2)
    texts = prompts(2)
    ids = [engine.submit(text, SamplingParams(max_new_tokens=6)) for text in texts]
    tokens = {each: [] for each in ids}
    while not all(tokens.values()):
        for event in engine.step():
            tokens[event.request_id].append(event.token)
    table = engine.memory._tables._rows
    table.state_slots[:2] = table.state_slots[[1, 0]]
    with pytest.raises(RuntimeError, match="expected row 0 to continue from"):
        engine.step()
    for each, rest in rest_of(engine).items():
        tokens[each] += rest
    assert [*tokens.values()] == expected(texts, 6) and engine.restarts == 1


def test_scored_prompts_and_short_rows_of_logits_are_computed_in_order():
    engine = recurrent_engine(max_tokens_per_step=16)
    texts = prompts(4, longest=20)
    params = SamplingParams(max_new_tokens=4, prompt_logprobs=0)
    results = engine.generate(texts, params, in_order=True)
    assert [each.tokens for each in results] == expected(texts, 4)


@pytest.mark.parametrize("seed", slow_but(range(3), range(30)))
def test_any_traffic_gives_the_tokens_of_each_text_alone(seed):
    chance = random.Random(seed)
    engine = recurrent_engine(
        max_tokens_per_step=chance.choice([4, 9, 16, 40]),
        num_blocks=chance.randrange(20, 60),
        snapshots=chance.randrange(6),
        every=chance.randrange(1, 5),
        context=18 * BLOCK,
    )
    waiting = prompts(12, seed, longest=30)
    texts, tokens = {}, {}
    while waiting or engine.has_work:
        if waiting and chance.random() < 0.4:
            count = chance.randrange(1, 15)
            request = engine.submit(waiting[-1], SamplingParams(max_new_tokens=count))
            texts[request], tokens[request] = (waiting.pop(), count), []
        for event in engine.step():
            tokens[event.request_id].append(event.token)
        if engine.open_requests and chance.random() < 0.03:
            gone = chance.choice(sorted(engine.open_requests))
            engine.abort(gone)
            del texts[gone]
    for request, (text, count) in texts.items():
        assert tokens[request] == MODEL.tokens_of(text, count)
    check_settled(engine)
