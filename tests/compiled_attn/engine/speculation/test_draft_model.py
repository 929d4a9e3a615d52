"""A draft model changes no token, whatever it drafts, and is captured at the warmup."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from compiled_attn.engine import EngineConfig, SamplingParams
from compiled_attn.engine.cache_size import CacheSize
from compiled_attn.errors import ConfigError
from compiled_attn.testing.fuzz.drafts import FreeRows
from tests.compiled_attn.engine.small import prompts_of, small_engine
from tests.compiled_attn.tiny import tiny_model

PROMPTS = prompts_of(10, longest=40)
GREEDY = [SamplingParams(max_new_tokens=20)] * len(PROMPTS)
RANDOM = [
    SamplingParams(max_new_tokens=20, temperature=0.8, top_p=0.95, seed=n)
    for n in range(len(PROMPTS))
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """The same model, one that agrees with it at times, and one of another vocabulary."""
    models = {
        "same": tiny_model(),
        "other": tiny_model(),
        "vocabulary": tiny_model(vocab_size=64),
    }
    torch.manual_seed(0)
    for weight in models["other"].parameters():
        weight += 0.3 * weight.std() * torch.randn_like(weight)
    root = tmp_path_factory.mktemp("models")
    for name, model in models.items():
        model.save_pretrained(root / name)
    return {name: root / name for name in models}


def drafted(folder: Path, **config):
    engine = small_engine(speculate=f"model:{folder}:3", max_graphs=12, **config)
    engine._drafter._costs = FreeRows(engine.sizing.buckets, {})
    engine._drafter._source.seconds_per_token = 0.0
    return engine


def tokens_of(engine, params):
    return [each.tokens for each in engine.generate(PROMPTS, params, in_order=True)]


@pytest.mark.parametrize(
    ("params", "config"),
    [(GREEDY, {}), (RANDOM, {"num_blocks": 24})],
    ids=["greedy", "random, preempted"],
)
def test_the_same_model_has_its_drafts_accepted(folders, params, config):
    engine = drafted(folders["same"], **config)
    assert tokens_of(engine, params) == tokens_of(small_engine(), params)
    report = engine.report()
    drafts, hits = (sum(report.drafts[kind]) for kind in ("drafted", "accepted"))
    assert hits > 0.9 * drafts > 50 and report.compiles_after_warmup == 0
    assert bool(report.preemptions) == bool(config)
    source = engine._drafter._source
    assert len(source._twins) <= 4
    assert tokens_of(engine, params) and source._memory.pool.num_used < 4 * 16


@pytest.mark.parametrize("params", [GREEDY, RANDOM], ids=["greedy", "random"])
def test_another_model_changes_no_token(folders, params):
    engine = drafted(folders["other"], sanitize=True)
    assert tokens_of(engine, params) == tokens_of(small_engine(), params)
    report = engine.report()
    assert 0 < sum(report.drafts["accepted"]) < sum(report.drafts["drafted"])


def test_what_an_exception_left_is_computed_again(folders, monkeypatch):
    engine = drafted(folders["same"])
    executor, calls = engine._drafter._source.executor, iter(range(1000))
    launch = executor.launch

    def failing(step):
        if next(calls) % 7 == 3:
            raise KeyboardInterrupt
        return launch(step)

    monkeypatch.setattr(executor, "launch", failing)
    names = [engine.submit(prompt, GREEDY[0]) for prompt in PROMPTS[:4]]
    received = {name: [] for name in names}
    while engine.has_work:
        try:
            events = engine.step()
        except KeyboardInterrupt:
            events = engine.take_events()
        for event in events:
            received[event.request_id].append(event.token)
    assert [*received.values()] == tokens_of(small_engine(), GREEDY)[:4]
    assert engine.restarts > 1 and sum(engine.report().drafts["accepted"]) > 5


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_the_memory_of_the_cache_is_that_of_both_models(folders, kv_dtype):
    given = {"num_blocks": None, "kv_dtype": kv_dtype, "max_seqs": 16}
    both = [given | {"kv_memory": "64KiB"}, given]  # as given, or what the model may take
    for config in both:
        alone, engine = small_engine(**config), drafted(folders["same"], **config)
        executors = engine.executor, engine._drafter._source.executor
        caches = [each.cache.bytes_per_block * each.cache.num_blocks for each in executors]
        assert caches[0] == caches[1]  # of the same model
        size = engine.report().kv_cache
        assert size["bytes"] == sum(caches)
        if "kv_memory" in config:
            assert 60 * 1024 < sum(caches) <= 64 * 1024
            assert size["blocks"] == alone.sizing.num_blocks // 2
        else:
            assert size["why"] == "max_seqs requests of full context"
    model = engine.executor.module.model
    wide = EngineConfig(max_seqs=10**6, max_tokens_per_step=10**6)
    sizes = [CacheSize.of(model, wide, 64, draft=draft) for draft in (None, model)]
    assert sizes[1].blocks == (sizes[0].blocks - 1) // 2 + 1 and sizes[1].why == sizes[0].why


def test_a_model_of_another_vocabulary_is_refused(folders):
    message = "expected a draft model with the model's vocabulary of 128 tokens, got one of 64: tak"
    with pytest.raises(ConfigError, match=message):
        drafted(folders["vocabulary"])
