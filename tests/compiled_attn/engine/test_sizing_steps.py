"""The most tokens of a step: what is given, or what the graphs of it cost."""

from __future__ import annotations

import pytest

from compiled_attn.engine import Engine, EngineConfig
from compiled_attn.engine.sizing import Sizing, StepSize
from compiled_attn.step import PartsLayout, TableLayout
from graphs import explicit
from graphs.store import ArtifactStore, StoredInductor
from tests.compiled_attn.tiny import tiny_model

LARGE = {"num_blocks": 200, "block_size": 8}


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
def test_by_default_it_is_larger_where_one_compile_serves_all_buckets(layout, backend, tokens):
    config = EngineConfig(**LARGE, backend=backend)
    sizing = Sizing.of(tiny_model(), config, layout)
    assert sizing.step == StepSize.of(config, layout.symbolic)
    assert sizing.step.tokens == sizing.buckets.largest.tokens == tokens
    assert sizing.step.why.startswith("one compile" if tokens == 512 else "a compile")


def test_a_store_shares_graphs_too(tmp_path):
    config = EngineConfig(backend=StoredInductor(ArtifactStore(tmp_path / "store")))
    assert StepSize.of(config, TableLayout.symbolic).tokens == 512


@pytest.mark.parametrize("tokens", [40, 300, 2000])
def test_what_is_given_stays_as_far_as_the_pool_has_slots(tokens):
    step = Sizing.of(
        tiny_model(), EngineConfig(**LARGE, max_tokens_per_step=tokens), TableLayout
    ).step
    assert step.tokens == min(tokens, 199 * 8)
    assert step.why.startswith("max_tokens_per_step" if tokens < 1000 else "slots of the pool")


def test_it_is_no_more_than_the_cache_or_the_requests_hold():
    pool = EngineConfig(num_blocks=17, block_size=8)
    assert Sizing.of(tiny_model(), pool, TableLayout).step.tokens == 16 * 8
    requests = EngineConfig(**LARGE, max_seqs=2, context=40)
    step = Sizing.of(tiny_model(), requests, TableLayout).step
    assert (step.tokens, step.why) == (80, "slots of the pool, or tokens of max_seqs contexts")


def test_it_is_what_given_buckets_hold_and_each_running_request_gets_a_token():
    buckets = explicit(TableLayout.axes, [(4, 4), (64, 4)])
    config = EngineConfig(**LARGE, buckets=buckets, max_seqs=4)
    assert StepSize.of(config, TableLayout.symbolic) == StepSize(64, "the largest bucket")
    many = EngineConfig(max_seqs=1000)
    assert StepSize.of(many, TableLayout.symbolic) == StepSize(1000, "max_seqs")


def test_the_scheduler_has_it_and_the_report_tells_it():
    engine = Engine(tiny_model(), EngineConfig(**LARGE, backend="eager"))
    assert engine.scheduler.max_tokens == 256
    assert engine.report().step_size == {"tokens": 256, "why": "a compile for each bucket"}
