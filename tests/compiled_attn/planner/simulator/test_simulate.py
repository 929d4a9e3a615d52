"""The step simulator against the engine, and against its scheduler, pool and batch builder."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("transformers", reason="needs the extra hf")

from compiled_attn.cache.blocks import BlockPool
from compiled_attn.cache.blocks.window import most_held
from compiled_attn.engine import Engine, EngineConfig, RequestState, SamplingParams, Scheduler
from compiled_attn.engine.logprobs import RowResult
from compiled_attn.planner.simulator import SimulatedEngine, StepTime, simulate
from compiled_attn.step import BatchBuilder, Request
from compiled_attn.workloads import Arrival, prompts, scaled, synthetic
from graphs import explicit
from tests.compiled_attn.tiny import tiny_model

VOCAB = 50_000
AXES = ("tokens", "shared", "unique", "logits")


def _scheduled(arrivals: list[Arrival], engine: SimulatedEngine) -> tuple[list[list[int]], int]:
    """What scheduler, pool and builder need, all requests offered at once, tokens never equal."""
    pool = BlockPool(engine.blocks + 1, engine.block_size, window=engine.window)
    scheduler = Scheduler(pool, engine.max_tokens, engine.max_seqs)
    builder = BatchBuilder(engine.blocks + 1, engine.block_size, engine.window)
    for index, tokens in enumerate(prompts(arrivals, VOCAB)):
        sampling = SamplingParams(max_new_tokens=arrivals[index].output_tokens)
        scheduler.add(RequestState(index, tokens, len(tokens), sampling, 0.0))
    needs, fresh = [], VOCAB
    while scheduler.has_work:
        step = scheduler.schedule()
        requests = [
            Request(
                part.sequence.tokens[part.sequence.computed : part.sequence.computed + part.count],
                part.sequence.computed,
                pool.table(part.sequence.request_id).array,
            )
            for part in step
        ]
        needs.append([*builder.need(requests).values(), len(requests)])
        sampled = [part.sequence for part in step if part.needs_logits]
        scheduler.commit(step)
        for sequence in sampled:
            fresh += 1
            ends = sequence.finish_reason(fresh)
            row = RowResult(fresh)
            event = sequence.event(row, 0, 0.0, ends)
            sequence.apply(row, 0, len(sequence.tokens), 0.0, event)
            if ends:
                scheduler.finish(sequence)
    return needs, scheduler.preemptions


lengths = st.tuples(st.integers(1, 60), st.integers(1, 12))
sizes = st.tuples(st.integers(1, 24), st.integers(0, 12), st.integers(1, 9), st.integers(10, 80))


@given(
    st.lists(lengths, min_size=1, max_size=12),
    sizes,
    st.lists(st.integers(0, 2), max_size=40),
    st.none() | st.integers(1, 40),
)
def test_each_step_needs_what_the_scheduler_makes_of_it(requests, sizes, ids, window):
    max_seqs, more_tokens, block_size, blocks = sizes
    tokens = max_seqs + more_tokens
    engine = SimulatedEngine(tokens, max_seqs, block_size, blocks, window=window)
    arrivals = [
        Arrival(0.0, prompt, output, tuple(ids[at : at + -(-prompt // 8)]), 8)
        for at, (prompt, output) in enumerate(requests)
        if most_held(prompt + output, window, tokens, block_size) <= blocks
    ]
    if arrivals:
        found = simulate(arrivals, engine, speed=None)
        assert found.needs["engine"].names == AXES
        needs, preemptions = _scheduled(arrivals, engine)
        assert found.needs["engine"].points.tolist() == [need[:4] for need in needs]
        assert found.needs["table"].points.tolist() == [[need[0], need[4]] for need in needs]
        assert found.preemptions == preemptions


def _engine(engine: SimulatedEngine, **config: object) -> Engine:
    """The real engine of these sizes, with one bucket that holds any step."""
    holds_all = (engine.max_tokens, engine.blocks, engine.blocks, engine.max_seqs)
    made = Engine(
        tiny_model(),
        EngineConfig(
            max_tokens_per_step=engine.max_tokens,
            max_seqs=engine.max_seqs,
            block_size=engine.block_size,
            num_blocks=engine.blocks + 1,
            buckets=explicit(AXES, [holds_all]),
            backend="eager",
            kernel="portable",
            **config,
        ),
    )
    made.warmup()
    return made


def _recorded(engine: Engine, arrivals: list[Arrival], concurrency: int | None) -> list[list[int]]:
    texts = prompts(arrivals, engine.sizing.vocab)
    sampling = [SamplingParams(max_new_tokens=a.output_tokens, ignore_eos=True) for a in arrivals]
    infos = []
    list(engine.generate(texts, sampling, concurrency=concurrency, on_step=infos.append))
    return [[info.step.need[axis] for axis in AXES] for info in infos]


def _some(hash_block: int, count: int = 7) -> list[Arrival]:
    """Prompts of up to 90 tokens, many of which begin alike."""
    rng = np.random.default_rng(hash_block)
    chains = [tuple(rng.integers(0, 3, 4).tolist()) for _ in range(count)]
    draws = zip(rng.integers(1, 90, count).tolist(), rng.integers(1, 16, count), strict=True)
    return [
        Arrival(0.0, prompt, int(output), ids[: prompt // hash_block], hash_block)
        for (prompt, output), ids in zip(draws, chains, strict=True)
    ]


@pytest.mark.parametrize(
    ("hash_block", "blocks", "concurrency"), [(20, 90, None), (16, 15, None), (16, 90, 3)]
)
def test_the_engine_records_the_simulated_needs(hash_block, blocks, concurrency):
    arrivals = _some(hash_block)
    sizes = SimulatedEngine(max_tokens=32, max_seqs=6, block_size=8, blocks=blocks)
    simulated = simulate(arrivals, sizes, speed=None, concurrency=concurrency)
    engine = _engine(sizes)
    assert simulated.needs["engine"].points.tolist() == _recorded(engine, arrivals, concurrency)
    assert simulated.preemptions == engine.scheduler.preemptions
    assert (simulated.preemptions > 0) == (blocks == 15)
    assert engine.report().prefix_hit_ratio > 0


def test_every_token_is_computed_once():
    arrivals = scaled(synthetic("chat", 60), 1 / 16)
    found = simulate(arrivals, SimulatedEngine(64, 8, 16, 200), speed=None)
    tokens, shared, unique, logits = found.needs["engine"].points.T
    assert found.preemptions == 0
    assert tokens.sum() == sum(a.prompt_tokens + a.output_tokens - 1 for a in arrivals)
    assert tokens.max() <= 64 and logits.max() <= 8 and (shared + unique <= 200).all()


def test_equal_prefixes_are_computed_once():
    alike = [Arrival(float(at), 64, 4, (1, 2), 32) for at in range(10)]
    unlike = [replace(arrival, prefix_ids=()) for arrival in alike]
    once, each = (
        simulate(arrivals, SimulatedEngine(64, 8, 16, 200), speed=1e-3)
        for arrivals in (alike, unlike)
    )
    assert each.needs["table"].points[:, 0].tolist() == [64, 1, 1, 1] * 10
    assert once.needs["table"].points[:, 0].tolist() == [64, 1, 1, 1] + [16, 1, 1, 1] * 9


def test_idle_time_passes_and_is_not_counted():
    arrivals = [Arrival(100.0 * at, 8, 3) for at in range(3)]
    time = StepTime(base=1.0, token=0.0, pair=0.0, block_slot=0.0)
    found = simulate(arrivals, SimulatedEngine(time=time))
    assert found.seconds == 9.0
    assert found.needs["engine"].points[:, 0].tolist() == [8, 1, 1] * 3
    together = simulate(arrivals, SimulatedEngine(time=time), speed=None)
    assert together.seconds == 3.0


def test_the_same_arrivals_give_the_same_needs():
    arrivals = synthetic("rag", 40)
    engine = SimulatedEngine(4096, 64, 64, 4096)
    assert simulate(arrivals, engine).needs == simulate(arrivals, engine).needs


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"arrivals": []}, "expected at least one arrival, got none"),
        ({"speed": 0.0}, "expected speed above 0 or None, got 0.0: 1 uses"),
        ({"speed": float("nan")}, "expected speed above 0 or None, got nan"),
        ({"concurrency": 0}, "expected concurrency >= 1 or None, got 0: "),
        (
            {"arrivals": [Arrival(0.0, 900, 200)]},
            "expected a pool that holds a request of 1100 tokens, got 4 blocks of 32: raise",
        ),
    ],
)
def test_what_cannot_be_served_is_refused(options, message):
    arguments = {"arrivals": [Arrival(0.0, 4, 4)], **options}
    with pytest.raises(ValueError, match=message):
        simulate(arguments.pop("arrivals"), SimulatedEngine(blocks=4), **arguments)


@pytest.mark.parametrize("name", ["max_tokens", "max_seqs", "block_size", "blocks"])
def test_sizes_of_the_simulated_engine_are_checked(name):
    with pytest.raises(ValueError, match=f"expected {name} >= 1, got 0: enlarge it"):
        replace(SimulatedEngine(), **{name: 0})
    with pytest.raises(ValueError, match="expected max_seqs <= max_tokens, got 9 > 8: every"):
        SimulatedEngine(8, 9)
