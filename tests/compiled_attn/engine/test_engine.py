"""The engine end to end on tiny models: the tokens of plain generate, whatever happens."""

from __future__ import annotations

import json
from functools import partial

import pytest

from compiled_attn import StepBatch
from compiled_attn.engine import ConfigError, Engine, EngineConfig, SamplingParams
from graphs import CaptureError, explicit
from tests.compiled_attn.engine.small import greedy, plain, prompts_of, small_engine
from tests.compiled_attn.tiny import FAMILIES, plain_generate, tiny_model
from tests.slow import slow_but

AXES = ("tokens", "shared", "unique", "logits")

_engine = partial(small_engine, num_blocks=128, max_graphs=8)


@pytest.mark.parametrize(
    ("family", "kernel"),
    [*((each, "auto") for each in FAMILIES)]
    + [(each, "portable") for each in ("llama", "mistral", "gemma2", "gpt_oss")],
)
def test_mixed_steps_generate_the_tokens_of_plain_generate(family, kernel):
    model, prompts = tiny_model(family), prompts_of(7)
    engine = _engine(model, kernel=kernel)
    assert greedy(engine, prompts, 9) == plain(model, prompts, 9)
    report = engine.report()
    assert report.prefix_hit_ratio > 0 and (report.kernel == "native") == (kernel == "auto")
    assert (report.padding_waste["blocks"] == 0) == (kernel == "auto")


@pytest.mark.parametrize("kernel", ["auto", "portable"])
def test_defragmentation_on_every_step_changes_no_token(kernel):
    model, prompts = tiny_model(), prompts_of(9, longest=30)
    engine = _engine(model, num_blocks=40, defrag_waste=0.0, kernel=kernel)
    assert greedy(engine, prompts, 14) == plain(model, prompts, 14)
    memory = engine.report().memory
    assert memory["defrag_moves"] > 0 and memory["defrag_swaps"] > 0


def test_after_each_defragmentation_no_block_below_the_highest_is_unused():
    engine = _engine(num_blocks=40, defrag_waste=0.0)
    for prompt in prompts_of(6, longest=20):
        engine.submit(prompt, SamplingParams(max_new_tokens=int(prompt[0]) % 9 + 1))
    while engine.scheduler.has_work:
        engine.step()
        engine.memory.settle()
        assert engine.pool.highest_used == engine.pool.num_used


@pytest.mark.parametrize("kernel", ["auto", "portable"])
def test_preemption_in_a_small_pool_changes_no_token(kernel):
    model, prompts = tiny_model(), prompts_of(6, longest=24)
    engine = _engine(model, num_blocks=16, max_seqs=4, kernel=kernel)
    params = SamplingParams(max_new_tokens=20)
    results = [*engine.generate(prompts, params, in_order=True)]
    assert [result.tokens for result in results] == plain(model, prompts, 20)
    assert engine.report().preemptions > 0 and engine.pool.stats().used == 0
    # Its own blocks, which it finds after a preemption, do not count as cached.
    assert all(result.cached_tokens < 20 for result in results)
    assert results[0].cached_tokens == 0


def test_results_report_how_much_of_the_prompt_was_cached():
    engine = _engine()
    prompt = [*range(1, 18)]  # four blocks of four, and a token

    def cached(prompt: list[int], **more: object) -> list[int]:
        results = engine.generate([prompt], SamplingParams(max_new_tokens=2), in_order=True, **more)
        return [each.cached_tokens for each in results]

    assert cached(prompt) == [0] and cached(prompt) == [16]
    assert cached([*prompt[:9], 99]) == [8]
    assert cached(prompt, salt="another") == [0]
    three = SamplingParams(max_new_tokens=2, n=3, temperature=1.0)
    results = engine.generate([prompt], three, in_order=True)
    assert [each.cached_tokens for each in results] == [16, 0, 0]
    scored = SamplingParams(max_new_tokens=2, prompt_logprobs=0)
    assert next(engine.generate([prompt], scored)).cached_tokens == 0


@pytest.mark.parametrize("backend", slow_but(("aot_eager",), ("aot_eager", "inductor")))
def test_captured_graphs_of_a_compiler_serve_without_a_compile(backend):
    model, prompts = tiny_model(), prompts_of(5)
    buckets = explicit(AXES, [(24, 32, 128, 4)])
    engine = _engine(model, backend=backend, buckets=buckets)
    assert greedy(engine, prompts, 6) == plain(model, prompts, 6)
    report = engine.report()
    assert (report.graphs, report.compiles_after_warmup, report.graph_breaks) == (1, 0, 0)


def test_a_step_that_no_bucket_holds_is_cut():
    model, prompts = tiny_model(), prompts_of(6)
    engine, steps = _engine(model, buckets=explicit(AXES, [(8, 4, 40, 2)])), []
    params = SamplingParams(max_new_tokens=5)
    for result in engine.generate(prompts, params, on_step=steps.append):
        assert result.tokens == plain_generate(model, prompts[result.index], 5)
    assert max(info.step.need["tokens"] for info in steps) <= 8


def test_cut_steps_are_counted_logged_once_and_recorded_whole(caplog):
    engine = _engine(kernel="portable", buckets=explicit(AXES, [(8, 4, 40, 2)]))
    infos, params = [], SamplingParams(max_new_tokens=2)
    with caplog.at_level("WARNING", "compiled_attn.engine.local"):
        list(engine.generate([[1] * 20, [2] * 30], params, on_step=infos.append))
    records = [info.step for info in infos]
    cut = [record for record in records if record.uncut_need != record.need]
    assert engine.report().cut_steps == len(cut) > 1
    assert records[0].uncut_need["tokens"] == 24 > records[0].need["tokens"]
    assert len(caplog.records) == 1 and "tokens=24" in caplog.text and "unique=40" in caplog.text


def test_the_default_ladder_holds_chunks_of_several_cachedprompts_of():
    engine = _engine(kernel="portable", context=64, max_graphs=6)
    prompts = [[n] * 48 for n in range(1, 5)]
    list(engine.generate(prompts, SamplingParams(max_new_tokens=1)))
    longer, infos = [[*p, 9, 8, 7] for p in prompts], []
    list(engine.generate(longer, SamplingParams(max_new_tokens=1), on_step=infos.append))
    assert max(info.step.need["shared"] for info in infos) > 64 // 4
    assert engine.report().cut_steps == 0


def test_sampling_is_reproducible_whatever_shares_the_batch():
    params = SamplingParams(max_new_tokens=12, temperature=1.0, top_k=20, top_p=0.9, seed=7)
    prompt = [3, 4, 5, 6]
    alone = next(_engine().generate([prompt], params)).tokens
    crowd = [*prompts_of(3), prompt]
    results = {r.index: r.tokens for r in _engine(num_blocks=24).generate(crowd, params)}
    assert results[3] == alone
    other = SamplingParams(max_new_tokens=12, temperature=1.0, seed=8)
    assert next(_engine().generate([prompt], other)).tokens != alone


def test_a_stop_token_ends_a_request_and_is_part_of_its_result():
    model = tiny_model()
    tokens = plain_generate(model, [1, 2, 3], 10)
    stop = tokens[4]
    params = SamplingParams(max_new_tokens=10, stop_token_ids=(stop,))
    (result,) = _engine(model).generate([[1, 2, 3]], params)
    assert result.finish_reason == "stop"
    assert result.tokens == tokens[: tokens.index(stop) + 1]


def test_the_models_end_of_sequence_token_ends_a_request_unless_ignored():
    model = tiny_model()
    tokens = plain_generate(model, [1, 2, 3], 10)
    engine = _engine(model)
    engine.executor.eos = frozenset([tokens[2]])
    expected = tokens[: tokens.index(tokens[2]) + 1]
    (stopped,) = engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=10))
    (ignored,) = engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=10, ignore_eos=True))
    assert stopped.tokens == expected and ignored.tokens == tokens


def test_tokens_stream_in_order_and_the_last_one_carries_the_result():
    engine = _engine()
    events = list(engine.stream(prompts_of(3), SamplingParams(max_new_tokens=4)))
    assert len(events) == 12
    for index in range(3):
        mine = [event for event in events if event.index == index]
        assert [event.result is not None for event in mine] == [False, False, False, True]
        assert mine[-1].result.tokens == [event.token for event in mine]


def test_a_consumer_that_stops_among_requests_that_finish_together_is_served_well():
    engine = _engine()
    stream = engine.stream([[1, 2], [3, 4]], SamplingParams(max_new_tokens=1))
    assert next(stream).result is not None
    stream.close()
    assert engine.report().requests == 2 and engine.pool.stats().used == 0


def test_concurrency_limits_the_requests_in_flight():
    engine, seen = _engine(), []
    list(
        engine.generate(
            prompts_of(6),
            concurrency=2,
            on_step=lambda info: seen.append(info.running + info.waiting),
        )
    )
    assert max(seen) == 2


def test_arrivals_are_waited_for():
    engine = _engine()
    results = list(engine.generate(prompts_of(2), arrivals=[0.05, 0.0]))
    # The prompt that arrives first is queued first and counted from its arrival.
    assert [result.request_id for result in results] == [0, 1]
    assert results[0].index == 1 and results[0].prompt == prompts_of(2)[1]


def test_the_report_counts_what_happened_and_is_json():
    engine = _engine()
    list(engine.generate(prompts_of(4), SamplingParams(max_new_tokens=3)))
    report = json.loads(json.dumps(engine.report().to_dict()))
    assert report["requests"] == 4 and report["generated_tokens"] == 12
    assert report["fallbacks"] == report["compiles_after_warmup"] == report["graph_breaks"] == 0
    assert 0 <= report["padding_waste"]["tokens"] < 1
    assert sum(row["steps"] for row in report["buckets"]) == report["steps"]
    assert set(report["ttft_ms"]) == set(report["step_ms"]) == {"p50", "p99", "max"}
    expected = (
        "graphs warmup_seconds tokens_per_second preemptions blocks_high_water checked_requests "
    )
    assert set((expected + "mismatched_tokens torch backend").split()) <= set(report)


def test_an_engine_that_is_not_warm_refuses_to_step():
    engine = Engine(tiny_model(), EngineConfig(backend="eager", num_blocks=70, block_size=4))
    engine.submit([1, 2])
    with pytest.raises(RuntimeError, match="warmup"):
        engine.step()


@pytest.mark.parametrize(
    ("prompt", "new", "message"),
    [
        ([], 4, "at least one token"),
        ([1, 500], 4, "0..127"),
        ([-1], 4, "0..127"),
        ([1] * 250, 10, "context 256"),
        ([1] * 100, 4, "pool"),
    ],
)
def test_a_request_that_can_never_be_served_is_refused_and_nothing_starts(prompt, new, message):
    engine = _engine(num_blocks=20)
    with pytest.raises(ConfigError, match=message):
        list(engine.generate([[1, 2], prompt], SamplingParams(max_new_tokens=new)))
    assert not engine.scheduler.has_work and engine.pool.requests == []


@pytest.mark.parametrize(
    "bad",
    [
        {"max_seqs": 0},
        {"max_seqs": 30, "max_tokens_per_step": 20},
        {"num_blocks": 1},
        {"block_size": 0},
        {"context": 512},
        {"buckets": explicit(("tokens", "blocks"), [(4, 4)])},
        {"max_graphs": 1, "buckets": explicit(AXES, [(8, 4, 40, 2), (8, 4, 50, 2)])},
    ],
)
def test_settings_that_cannot_work_are_refused(bad):
    with pytest.raises(ConfigError, match="expected"):
        _engine(**bad)


def test_aborting_an_unknown_request_is_an_error():
    with pytest.raises(KeyError, match="got 5"):
        _engine().abort(5)


def test_an_abort_while_streaming_ends_that_request_only():
    engine = _engine()
    events = []
    for event in engine.stream([[1, 2, 3], [4, 5]], SamplingParams(max_new_tokens=5)):
        events.append(event)
        if event.index == 0:
            engine.abort(0) if 0 in engine.open_requests else None
    assert [e.index for e in events].count(1) == 5 and [e.index for e in events].count(0) == 1
    assert engine.pool.stats().used == 0


def test_events_go_to_whom_they_belong():
    engine, params = _engine(), SamplingParams(max_new_tokens=4)
    by_hand = engine.submit([9, 8, 7], params)
    stream = engine.stream([[1, 2], [3, 4]], params)
    streamed = [next(stream)]
    received = engine.step()  # in the middle of the stream
    also = engine.submit([6, 5], params)
    streamed += stream
    while engine.has_work:
        received += engine.step()
    assert [event.index for event in streamed].count(0) == 4 == len(streamed) // 2
    assert {event.request_id for event in received} == {by_hand, also} and len(received) == 8
    for request, prompt in ((by_hand, [9, 8, 7]), (also, [6, 5])):
        tokens = [event.token for event in received if event.request_id == request]
        assert tokens == plain_generate(engine.executor.module.model, prompt, 4)
    assert engine.step() == []


def test_a_bucket_that_cannot_be_captured_is_an_error_when_strict_and_a_fallback_otherwise():
    def broken(bucket):
        if bucket["tokens"] == 24:
            raise ValueError("no inputs for this one")
        return StepBatch.padding(bucket)

    for strict in (True, False):
        settings = {"buckets": explicit(AXES, [(24, 32, 128, 4), (8, 8, 40, 4)]), "strict": strict}
        engine = Engine(
            tiny_model(), EngineConfig(24, 4, 4, num_blocks=128, backend="eager", **settings)
        )
        engine.executor.graphs._capturing.make_inputs = broken
        if strict:
            with pytest.raises(CaptureError, match="1 of 2 buckets"):
                engine.warmup()
        else:
            engine.warmup()
            assert len(list(engine.generate([[1, 2, 3] * 5]))) == 1
            assert engine.report().graphs == 1
            with pytest.raises(ConfigError, match="unique"):
                engine.submit([1] * 250, SamplingParams(max_new_tokens=6))


def test_a_request_whose_last_token_needs_no_slot_fits():
    engine = _engine(num_blocks=3, block_size=4)
    (result,) = engine.generate([[1] * 8], SamplingParams(max_new_tokens=1))
    assert len(result.tokens) == 1
