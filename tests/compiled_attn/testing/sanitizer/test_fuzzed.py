"""No false alarm, and the same tokens, whatever an engine is asked to do."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from compiled_attn.engine import ConfigError, Engine, EngineConfig, SamplingParams
from compiled_attn.testing import CorruptCache, kv_sanitizer
from graphs.store.factors import graph_factors
from tests.compiled_attn.engine.small import SIZES, greedy, plain, prompts_of, small_engine
from tests.compiled_attn.testing.sanitizer.faults import changed_batches
from tests.compiled_attn.tiny import tiny_model
from tests.slow import slow_but


def fuzz(engine: Engine, steps: int, seed: int) -> list[Any]:
    """Random submits, aborts and exceptions; returns all events."""
    rng, events = np.random.default_rng(seed), []
    prefixes = [rng.integers(1, 128, size).tolist() for size in (9, 16, 30)]
    for _ in range(steps):
        draw = rng.random()
        if draw < 0.4 and len(engine.open_requests) < 8:
            prompt = [] if rng.random() < 0.3 else prefixes[int(rng.integers(3))]
            prompt = prompt + rng.integers(1, 128, int(rng.integers(1, 25))).tolist()
            salt = "tenant" if rng.random() < 0.2 else None
            params = SamplingParams(
                max_new_tokens=int(rng.integers(1, 20)),
                prompt_logprobs=0 if rng.random() < 0.1 else None,
            )
            engine.submit(prompt, params, salt=salt)
        elif draw < 0.46 and engine.open_requests:
            engine.abort(min(engine.open_requests))
        elif draw < 0.48:
            engine._rollback()
        events += [(each.request_id, each.token) for each in engine.step()]
    return events


CONFIGS = {
    "native": {"kernel": "native"},
    "portable": {"kernel": "portable", "defrag_waste": 0.1},
    "moved": {"kernel": "native", "defrag_waste": 0},
    "int8": {"kernel": "native", "kv_dtype": "int8", "defrag_waste": 0.1},
    "fp8": {"kernel": "portable", "kv_dtype": "fp8"},
}


@pytest.mark.parametrize(
    ("name", "steps"),
    slow_but([("native", 40), ("portable", 40)], itertools.product(CONFIGS, (40, 1500))),
)
def test_no_false_alarm(name: str, steps: int) -> None:
    settings = {"num_blocks": 20, "max_graphs": 1, **CONFIGS[name]}
    engines = [small_engine(sanitize=each, **settings) for each in (False, True)]
    plain, checked = (fuzz(engine, steps, seed=4) for engine in engines)
    assert checked == plain
    report = engines[1].report()
    assert steps < 100 or (report.preemptions and report.memory["evictions"])
    assert "sanitizer" in report.kernel_notes


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mistral", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("kernel", ["native", "portable"])
def test_families(family: str, kernel: str) -> None:
    prompts = prompts_of(6)
    settings = {"kernel": kernel, "num_blocks": 40}
    engines = [
        small_engine(tiny_model(family), sanitize=each, **settings) for each in (False, True)
    ]
    plain, checked = (greedy(engine, prompts, 8) for engine in engines)
    assert checked == plain


def test_an_engine_is_checked_for_a_while() -> None:
    engine = Engine(tiny_model(), EngineConfig(**SIZES, defrag_waste=0))
    waiting = engine.submit([1, 2, 3], SamplingParams(max_new_tokens=2))
    before = dict(engine.executor.cache.named_buffers())  # type: ignore[attr-defined]
    with kv_sanitizer(engine):
        pass
    cache = engine.executor.cache  # type: ignore[attr-defined]
    assert dict(cache.named_buffers()).keys() == before.keys()
    with kv_sanitizer(engine):
        engine.warmup()
        assert engine._steps.watch is not None
        inside = greedy(engine, prompts_of(4), 6)
    assert engine._steps.watch is None
    assert inside == greedy(engine, prompts_of(4), 6)
    assert {event.request_id for event in engine.step()} <= {waiting}
    with pytest.raises(ValueError, match="got a warm one"), kv_sanitizer(engine):
        pass
    checked = small_engine(sanitize=True)
    with pytest.raises(ValueError, match="leave one of them out"), kv_sanitizer(checked):
        pass


def test_a_free_block_that_a_fault_wrote_to_is_usable_again() -> None:
    engine = small_engine(sanitize=True, num_blocks=12, max_graphs=1)
    engine.submit([1, 2, 3], SamplingParams(max_new_tokens=3))
    engine.step()
    for block in (11, 5):

        def fault(plan: Any, batch: Any, slot: int = 4 * block) -> Any:
            slots = batch.slot_mapping.clone()
            slots[0] = slot
            return batch._replace(slot_mapping=slots)

        with changed_batches(fault), pytest.raises(CorruptCache, match="use_after_free"):
            engine.step()
    prompts = prompts_of(3, longest=24)
    assert greedy(engine, prompts, 4) == plain(tiny_model(), prompts, 4)
    assert engine.pool.stats().peak_used >= 5  # one of the two blocks at least


def test_stored_graphs_of_other_engines_are_not_taken() -> None:
    factors = []
    for is_checked in (False, True):
        executor: Any = Engine(tiny_model(), EngineConfig(**SIZES, sanitize=is_checked)).executor
        inputs = executor._steps.padding(next(iter(executor.sizing.buckets)))
        factors.append(graph_factors(executor.module, inputs, backend="inductor", options={}))
    assert factors[0] != factors[1]


def test_settings_that_cannot_be_checked_are_refused() -> None:
    with pytest.raises(ConfigError, match="onnxrt, which cannot capture its checks"):
        EngineConfig(backend="onnxrt", sanitize=True)
