"""The most tokens of a step, and sizes that no machine has."""

from __future__ import annotations

from dataclasses import replace

import pytest

from compiled_attn.cache.kv_cache import PagedKVCache
from compiled_attn.engine import ConfigError, Engine, EngineConfig
from compiled_attn.engine.sizing import Sizing, StepSize, step_limits
from compiled_attn.models.hf import cache_for
from compiled_attn.step import PartsLayout, TableLayout
from graphs import explicit
from graphs.capture.memory import machine_bytes
from graphs.store import ArtifactStore, StoredInductor

SMALL = {"block_size": 4, "num_blocks": 17, "max_seqs": 4, "context": 40}
LARGE = {"num_blocks": 200, "block_size": 8}


@pytest.mark.parametrize("tokens", [10**12, 10**20, 2**63 - 1])
@pytest.mark.parametrize("layout", [PartsLayout, TableLayout])
def test_a_step_has_no_more_tokens_than_the_pool_has_slots(model, tokens, layout):
    config = EngineConfig(**SMALL, max_tokens_per_step=tokens)
    buckets = Sizing.of(model, config, layout).buckets
    assert max(bucket.tokens for bucket in buckets) == 16 * 4


def test_a_step_has_no_more_requests_than_blocks_and_no_more_tokens_than_their_contexts():
    def limits(**changes):
        config = EngineConfig(**{**SMALL, "block_size": 8, **changes})
        return step_limits(config, config.max_tokens_per_step, 40, 17)

    many = limits(max_tokens_per_step=10**20, max_seqs=10**20)
    assert (many.seqs, many.tokens) == (16, 16 * 8)
    few = limits(max_tokens_per_step=10**20, max_seqs=2)
    assert (few.seqs, few.tokens) == (2, 2 * 40)
    assert limits(max_tokens_per_step=9).tokens == 9


def test_an_engine_whose_steps_are_brought_down_serves(model):
    most = {**SMALL, "max_tokens_per_step": 10**12, "max_seqs": 10**12}
    engine = Engine(model, EngineConfig(**most, backend="eager"))
    engine.warmup()
    results = list(engine.generate([[1, 2, 3], [4, 5]]))
    assert all(len(result.tokens) == 16 for result in results)


@pytest.mark.parametrize("changes", [{"num_blocks": 10**20}, {"block_size": 10**20}])
def test_a_cache_beyond_the_memory_of_the_machine_is_refused_before_it_is_made(
    model, changes, monkeypatch
):
    made = []
    remember = PagedKVCache.__init__

    def init(self, layers, blocks, block_size, *args, **kwargs):
        made.append(blocks * block_size)
        remember(self, layers, blocks, block_size, *args, **kwargs)

    monkeypatch.setattr(PagedKVCache, "__init__", init)
    config = EngineConfig(**{**SMALL, **changes}, max_tokens_per_step=64)
    slots = config.num_blocks * config.block_size
    expected = slots * cache_for(model, 2, 1).bytes_per_block
    with pytest.raises(ConfigError) as caught:
        Engine(model, config)
    text = str(caught.value)
    assert f"at most {machine_bytes():,} bytes" in text and f"got {expected:,} bytes" in text
    assert "--num-blocks" in text and max(made) < 100


def test_portable_steps_beyond_the_memory_of_the_machine_are_refused(model, monkeypatch):
    monkeypatch.setattr("compiled_attn.engine.cache_size.machine_bytes", lambda device: 10**6)
    config = EngineConfig(**{**SMALL, "num_blocks": 200, "max_seqs": 64}, max_tokens_per_step=800)
    with pytest.raises(
        ConfigError, match=r"at most 1,000,000 .* got [3-9],\d{3},\d{3} bytes at least"
    ):
        Sizing.of(model, config)
    assert Sizing.of(model, config, TableLayout).num_blocks == 200
    small = explicit(PartsLayout.axes, [(16, 8, 16, 4)])  # steps are cut to it
    assert Sizing.of(model, replace(config, buckets=small)).buckets.largest.tokens == 16


def test_buckets_beyond_the_memory_of_the_machine_are_refused(model):
    config = EngineConfig(**SMALL, max_tokens_per_step=16)
    for layout, sizes in ((PartsLayout, (16, 10**12, 16, 4)), (TableLayout, (16, 10**12))):
        with pytest.raises(ConfigError, match=r"not enough memory: .* or take smaller buckets"):
            Sizing.of(model, replace(config, buckets=explicit(layout.axes, [sizes])), layout)


@pytest.mark.parametrize(
    ("layout", "backend", "tokens"),
    [
        (TableLayout, "inductor", 512),
        (TableLayout, "eager", 256),
        (TableLayout, "aoti", 256),
        (PartsLayout, "inductor", 256),
        (PartsLayout, "unknown", 256),
    ],
)
def test_by_default_a_step_is_larger_where_one_compile_serves_all_buckets(
    model, layout, backend, tokens
):
    config = EngineConfig(**LARGE, backend=backend)
    sizing = Sizing.of(model, config, layout)
    assert sizing.step == StepSize.of(config, layout.symbolic)
    assert sizing.step.tokens == sizing.buckets.largest.tokens == tokens
    assert sizing.step.why.startswith("one compile" if tokens == 512 else "a compile")


def test_a_store_shares_graphs_too(tmp_path):
    config = EngineConfig(backend=StoredInductor(ArtifactStore(tmp_path / "store")))
    assert StepSize.of(config, TableLayout.symbolic).tokens == 512


@pytest.mark.parametrize("tokens", [40, 300, 2000])
def test_what_is_given_stays_as_far_as_the_pool_has_slots(model, tokens):
    step = Sizing.of(model, EngineConfig(**LARGE, max_tokens_per_step=tokens), TableLayout).step
    assert step.tokens == min(tokens, 199 * 8)
    assert step.why.startswith("max_tokens_per_step" if tokens < 1000 else "slots of the pool")


def test_a_step_is_no_more_than_the_cache_or_the_requests_hold(model):
    pool = EngineConfig(num_blocks=17, block_size=8)
    assert Sizing.of(model, pool, TableLayout).step.tokens == 16 * 8
    requests = EngineConfig(**LARGE, max_seqs=2, context=40)
    step = Sizing.of(model, requests, TableLayout).step
    assert (step.tokens, step.why) == (80, "slots of the pool, or tokens of max_seqs contexts")


def test_a_step_is_what_given_buckets_hold_and_each_running_request_gets_a_token():
    buckets = explicit(TableLayout.axes, [(4, 4), (64, 4)])
    config = EngineConfig(**LARGE, buckets=buckets, max_seqs=4)
    assert StepSize.of(config, TableLayout.symbolic) == StepSize(64, "the largest bucket")
    many = EngineConfig(max_seqs=1000)
    assert StepSize.of(many, TableLayout.symbolic) == StepSize(1000, "max_seqs")


def test_the_scheduler_has_the_size_and_the_report_tells_it(model):
    engine = Engine(model, EngineConfig(**LARGE, backend="eager"))
    assert engine.scheduler.max_tokens == 256
    assert engine.report().step_size == {"tokens": 256, "why": "a compile for each bucket"}
