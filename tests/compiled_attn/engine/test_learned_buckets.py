"""Buckets that an engine learns from the steps of earlier runs."""

from __future__ import annotations

import json

import pytest

from compiled_attn.engine import ConfigError, Engine, EngineConfig, SamplingParams
from compiled_attn.engine.sizing import LAYOUTS, Sizing
from compiled_attn.ranks.engine import engine_on
from graphs.buckets.recorded import RecordedSizes
from tests.compiled_attn.engine.small import SIZES, prompts_of, small_engine
from tests.compiled_attn.tiny import tiny_model


def served(engine):
    results = engine.generate(prompts_of(3, longest=11), SamplingParams(max_new_tokens=4))
    return {result.index: result.tokens for result in results}


@pytest.mark.parametrize("kernel", LAYOUTS)
def test_the_next_start_pads_less_and_serves_the_same_tokens(kernel, tmp_path):
    path = tmp_path / "sizes.jsonl"
    config = {"kernel": kernel, "learn_buckets": path}
    first = small_engine(**config)
    tokens = served(first)
    first.sizing.recorded.write()
    ladder = {*first.sizing.buckets}
    steps = first.tally.count("steps")

    counts = RecordedSizes(path, LAYOUTS[kernel].axes).counts
    assert sum(counts.values()) == steps > 0
    assert all(set(json.loads(line)) == {"need", "count", "window"} for line in path.open())

    second = small_engine(**config)
    more = {*second.sizing.buckets} - ladder
    assert {*second.sizing.buckets} > ladder and len(more) == 1  # a third of four
    assert served(second) == tokens
    assert second.report().compiles_after_warmup == 0

    def paid(engine):
        rows = ((bucket, engine.tally.of_bucket(bucket)[0]) for bucket in engine.sizing.buckets)
        return sum(engine.sizing.buckets.cost(bucket) * count for bucket, count in rows)

    assert paid(second) < paid(first)
    second.sizing.recorded.write()
    assert sum(RecordedSizes(path, LAYOUTS[kernel].axes).counts.values()) == 2 * steps


def test_given_buckets_stay_and_others_are_learned(tmp_path):
    path = tmp_path / "sizes.jsonl"
    config = EngineConfig(**SIZES, learn_buckets=path)
    model = tiny_model()
    given = Sizing.of(model, config, LAYOUTS["native"]).buckets
    recorded = RecordedSizes(path, ("tokens", "requests"))
    for _ in range(50):
        recorded.add((9, 2))
    recorded.write()
    found = Sizing.of(model, EngineConfig(**SIZES, learn_buckets=path, buckets=given),
                      LAYOUTS["native"]).buckets  # fmt: skip
    assert {*found} > {*given} and found.pick(tokens=9, requests=2).sizes == (9, 2)


def test_another_file_is_refused_before_anything_is_loaded(tmp_path):
    path = tmp_path / "sizes.jsonl"
    path.write_text("axes: tokens requests\n(1, 1)\n")
    with pytest.raises(ConfigError, match=r"sizes.jsonl:1: not valid JSON.*: name another file"):
        Engine(tiny_model(), EngineConfig(**SIZES, learn_buckets=path))
    recorded = RecordedSizes(tmp_path / "portable", LAYOUTS["portable"].axes)
    recorded.add((1, 0, 1, 1))
    recorded.write()
    config = EngineConfig(**SIZES, learn_buckets=tmp_path / "portable", kernel="native")
    with pytest.raises(ConfigError, match="expected sizes of tokens, requests, got"):
        Engine(tiny_model(), config)


def test_several_ranks_must_agree_on_their_buckets(tmp_path):
    config = EngineConfig(**SIZES, learn_buckets=tmp_path / "sizes.jsonl")
    with pytest.raises(ConfigError, match="expected no learn_buckets on several ranks"):
        engine_on(None, tiny_model(), config)
