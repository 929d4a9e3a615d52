"""Models of which some layers have a sliding window: those have fewer blocks than the others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from compiled_attn.bundle import Bundle, BundleExecutor, write_bundle
from compiled_attn.cache.blocks import BlockPool
from compiled_attn.cache.blocks.grouped import GroupedPool
from compiled_attn.engine import ConfigError, Engine, EngineConfig, SamplingParams
from compiled_attn.engine.cache_size import CacheSize
from compiled_attn.engine.sizing import Sizing
from compiled_attn.models.hf import cache_for
from compiled_attn.ops import load
from compiled_attn.ranks.executor import RankExecutor
from compiled_attn.step import TableLayout
from compiled_attn.testing import CorruptCache, kv_sanitizer
from compiled_attn.text.plain_tokenizer import PlainTokenizer
from tests.compiled_attn.engine.small import greedy, plain, prompts_of, small_engine
from tests.compiled_attn.testing.sanitizer.faults import changed_batches
from tests.compiled_attn.tiny import tiny_model
from tests.slow import slow_but

MIXED = ["gemma3_text", "gpt_oss", "gemma2"]
BLOCK = 2 * 4 * 2 * 16 * 4  # bytes of a block of 4 tokens in one layer


def _tokens(count: int, seed: int = 1) -> list[int]:
    return np.random.default_rng(seed).integers(1, 128, count).tolist()


def _engine(family: str = "gemma3_text", **config: Any) -> Engine:
    return small_engine(tiny_model(family), **{"max_graphs": 2, **config})


def _needed(engine: Engine) -> int:
    assert isinstance(engine.pool, GroupedPool)
    return engine.pool.near.num_needed


@pytest.mark.parametrize("family", MIXED)
def test_a_request_much_longer_than_the_window_has_the_tokens_of_the_model(family):
    engine, prompt = _engine(family, max_seqs=1, sanitize=True), _tokens(190)
    assert greedy(engine, [prompt], 40) == plain(tiny_model(family), [prompt], 40)
    assert engine.memory.stats().peak_used == 58  # of the layer that sees everything
    assert engine.pool.near.peak_needed <= 9 and engine.pool.num_used == _needed(engine) == 0


CASES: list[tuple[dict[str, Any], bool]] = [
    ({"num_blocks": 120, "sanitize": True}, False),
    ({"num_blocks": 30, "sanitize": True}, True),
    ({"num_blocks": 34, "defrag_waste": 0.0, "sanitize": True}, True),
    ({"num_blocks": 120, "speculate": "ngram:4", "sanitize": True}, False),
    ({"num_blocks": 120, "kv_dtype": "int8"}, False),
    ({"kv_memory": 36 * BLOCK + 14 * BLOCK, "sanitize": True, "context": 120}, True),
    ({"num_blocks": 30, "backend": "inductor"}, True),
    ({"num_blocks": 120, "backend": "inductor", "sanitize": True}, False),
]


@pytest.mark.parametrize(("config", "is_crowded"), slow_but(CASES[:7], CASES))
def test_tokens_are_those_of_the_model_when_requests_compete(config, is_crowded):
    prompts = prompts_of(8, longest=100)
    if "kv_memory" in config:
        config = {"num_blocks": None, **config}
    engine = _engine(**config)
    if "kv_dtype" in config:
        other = small_engine(tiny_model("gemma3_text"), kernel="portable", **config)
        expected = greedy(other, prompts, 12)
    else:
        expected = plain(tiny_model("gemma3_text"), prompts, 12)
    for _ in range(2):  # then with prefixes that are found
        assert greedy(engine, prompts, 12) == expected
    stats = engine.memory.stats()
    assert bool(stats.preemptions) == is_crowded and stats.hit_tokens > 0
    assert engine.pool.num_used == _needed(engine) == 0


@pytest.mark.parametrize("family", MIXED)
def test_what_null_and_unneeded_blocks_hold_does_not_matter(family):
    engine, results, prompts = _engine(family), {}, prompts_of(6, longest=100)
    cache = engine.executor.cache
    for prompt in prompts:
        engine.submit(prompt, SamplingParams(max_new_tokens=12))
    while engine.has_work:
        near = engine.pool.near
        unneeded = [0, *near._free, *near._idle]
        for block in near._idle:  # nor may a prefix be found there
            near.near_of[near._block_of[block]] = 0
            near._free.append(block)
        near._idle.clear()
        for name, buffer in cache.buffers_of(near=True).items():
            assert name.startswith(("key", "value"))
            buffer.unflatten(0, (cache.near.num_blocks, -1))[unneeded] = float("nan")
        for event in engine.step():
            if event.result is not None:
                results[event.request_id] = event.result.tokens
    assert [results[at] for at in range(6)] == plain(tiny_model(family), prompts, 12)


def test_a_conversation_finds_what_was_computed_before():
    engine, model = _engine(num_blocks=140, max_seqs=1, sanitize=True), tiny_model("gemma3_text")
    prompt, params = _tokens(70), SamplingParams(max_new_tokens=9)
    for _ in range(3):
        (result,) = engine.generate([prompt], params)
        assert [result.tokens] == plain(model, [prompt], 9)
        prompt = [*prompt, *result.tokens, *_tokens(11, len(prompt))]
    assert result.cached_tokens == 96  # of 110: 11 are new, and the last token was not computed


def test_a_rolled_back_step_begins_with_no_near_block():
    engine, prompts = _engine(), [_tokens(60), _tokens(90)]
    ids = [engine.submit(each, SamplingParams(max_new_tokens=9)) for each in prompts]
    for _ in range(5):
        engine.step()
    assert _needed(engine) > 0
    engine.abort(ids[0])
    engine._rollback()
    assert _needed(engine) == 0 and not engine.executor.near_of.any()
    tokens = [event.token for _ in range(40) if engine.has_work for event in engine.step()]
    assert tokens == plain(tiny_model("gemma3_text"), prompts[1:], 9)[0][-len(tokens) :]
    assert engine.pool.num_used == _needed(engine) == 0


@pytest.mark.parametrize("backend", slow_but(["eager"], ["eager", "inductor"]))
@pytest.mark.parametrize("is_write", [True, False])
def test_the_sanitizer_finds_a_wrong_near_block(is_write, backend):
    engine = _engine(sanitize=True, backend=backend)
    ids = [engine.submit(_tokens(30, seed), SamplingParams(max_new_tokens=40)) for seed in (1, 2)]
    for _ in range(5):
        engine.step()
    tables = [engine.pool.table(each) for each in ids]
    at = -1 if is_write else -2

    def exchanged(_: Any, batch: Any) -> Any:
        near_of, (a, b) = engine.executor.near_of, (table.blocks[at] for table in tables)
        near_of[a], near_of[b] = near_of[b], near_of[a]
        return batch

    with changed_batches(exchanged), pytest.raises(CorruptCache) as caught:
        engine.step()
    error = caught.value
    assert error.kind == ("two_writers" if is_write else "wrong_owner"), str(error)
    assert error.layer == 0 and error.block in [table.blocks[at] for table in tables]
    for each in ids:
        engine.abort(each)
    engine.take_events()
    assert greedy(engine, [_tokens(40)], 5) == plain(tiny_model("gemma3_text"), [_tokens(40)], 5)


def test_a_cache_with_near_layers_is_checked_by_its_engine_only():
    cache = cache_for(tiny_model("gemma3_text"), 8, 4, near_blocks=4)
    with pytest.raises(ValueError, match="got one with near layers"), kv_sanitizer(cache):
        pass


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text"])
@pytest.mark.parametrize("kernel", ["native", "portable"])
def test_only_mixed_models_in_tables_have_near_blocks(family, kernel):
    engine = _engine(family, kernel=kernel)
    has_near = family == "gemma3_text" and kernel == "native"
    assert isinstance(engine.pool, GroupedPool if has_near else BlockPool)
    assert isinstance(engine.pool, GroupedPool) == has_near
    assert (engine.executor.cache.near is not None) == has_near
    assert engine.sizing.near_window == (9 if has_near else None)


def test_a_drafting_model_holds_all_of_its_blocks(tmp_path):
    draft = tiny_model("gemma3_text", seed=1)
    draft.save_pretrained(tmp_path)
    engine = _engine(speculate=f"model:{tmp_path}:3", num_blocks=120, max_graphs=12)
    prompts = prompts_of(4, longest=100)
    assert greedy(engine, prompts, 12) == plain(tiny_model("gemma3_text"), prompts, 12)


def _size(**config: Any) -> CacheSize:
    model = tiny_model("gemma3_text")
    slot = cache_for(model, 2, 1, near_blocks=2)
    given = EngineConfig(**{"block_size": 4, "max_seqs": 2, **config})
    return CacheSize.of(model, given, 256, slot=slot, step=24)


def test_memory_is_for_all_windows_and_the_rest_for_contexts():
    many = _size(kv_memory=1000 * BLOCK)  # 2 + 2 * 2 windows of 4 + a step
    assert (many.near_blocks, many.blocks, many.bytes) == (24, 976, 1000 * BLOCK)
    few = _size(kv_memory=40 * BLOCK, max_seqs=50)  # no request of full context fits
    assert (few.near_blocks, few.blocks) == (20, 20)
    one = _size(kv_memory=85 * BLOCK, max_seqs=50)  # it does with fewer windows
    assert (one.near_blocks, one.blocks) == (20, 65)
    assert _size(num_blocks=100).near_blocks == 24 and _size(num_blocks=9).near_blocks == 9
    with pytest.raises(ConfigError, match=f"at least {4 * BLOCK:,} bytes"):
        _size(kv_memory=4 * BLOCK - 1)


def test_ranks_have_the_blocks_of_the_smallest_within_their_memory():
    class Smallest(SimpleNamespace):
        def minimum(self, number: int) -> int:
            return min(number, self.others.pop(0))

    class OfRank(RankExecutor):
        def __init__(self, *others: int) -> None:
            self.ranks = Smallest(others=[*others])
            self.kernel = SimpleNamespace(layout=TableLayout)
            self.config = EngineConfig(
                max_tokens_per_step=50, max_seqs=50, block_size=4, kv_memory=85 * BLOCK
            )
            self.draft = None

    model = tiny_model("gemma3_text")
    alone = Sizing.of(model, OfRank().config, TableLayout)
    alike = OfRank(1000, 1000)._sizing_of(model)
    assert (alike.num_blocks, alike.near_blocks) == (alone.num_blocks, alone.near_blocks)
    assert alike.cache.bytes <= 85 * BLOCK
    smaller = OfRank(60, 18)._sizing_of(model)
    assert (smaller.num_blocks, smaller.near_blocks) == (60, 18)


def test_by_default_there_are_windows_and_contexts_for_max_seqs():
    size = _size()
    assert (size.blocks, size.near_blocks) == (1 + 2 * 64, 24)
    assert size.why == "max_seqs requests of full context"


def test_a_bundle_has_near_blocks_too(tmp_path):
    if load().build is None:
        pytest.skip("needs a C++ compiler")
    model, prompts = tiny_model("gemma3_text"), prompts_of(4, longest=100)
    sizes: dict[str, Any] = {"block_size": 4, "num_blocks": 120, "max_tokens_per_step": 16}
    engine = Engine(model, EngineConfig(**sizes, max_seqs=2, max_graphs=2, store=False))
    engine.warmup()
    expected = greedy(engine, prompts, 12)
    with (
        mock.patch.object(PlainTokenizer, "write"),
        mock.patch.object(PlainTokenizer, "read"),
        mock.patch("compiled_attn.bundle.write._check_tokenizer"),
    ):
        write_bundle(engine.executor, None, tmp_path / "bundle", "tiny")
    other = Engine(BundleExecutor(Bundle(tmp_path / "bundle")))
    other.warmup()
    assert other.sizing.near_blocks == engine.sizing.near_blocks
    assert greedy(other, prompts, 12) == expected == plain(model, prompts, 12)
