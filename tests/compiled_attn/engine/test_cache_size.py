"""The size of a cache: as given, or from the weights, the free memory and what requests fill."""

from __future__ import annotations

import contextlib

import pytest

from compiled_attn.engine import ConfigError, Engine, EngineConfig, SamplingParams, cache_size
from compiled_attn.engine.cache_size import CacheSize
from compiled_attn.engine.config import byte_size
from compiled_attn.models import default_model
from compiled_attn.models.packed import pack_linears, packable
from compiled_attn.ops.packed_linear import as_rounded
from tests.compiled_attn.tiny import tiny_model

MIB = 2**20
BLOCK = 2 * 2 * 2 * 16 * 4 * 4
"""Bytes of a block of 4 tokens: 2 layers, keys and values, 2 heads of 16, in float32."""


@pytest.fixture
def free(monkeypatch):
    """Sets the bytes that the machine has free."""
    return lambda count: monkeypatch.setattr(cache_size, "free_bytes", lambda device: count)


def _size(model, context=64, **config) -> CacheSize:
    config = {"block_size": 4, "max_seqs": 4, "max_tokens_per_step": 32, **config}
    return CacheSize.of(model, EngineConfig(**config), context)


def test_a_size_is_bytes_or_a_number_with_a_unit():
    sizes = {1: 1, 2**31: 2**31, "2147483648": 2**31, "2GiB": 2**31, " 2 gib ": 2**31}
    sizes |= {"512MiB": 2**29, "3KiB": 3072, "1.5GB": 1_500_000_000, "0.1MB": 100_000, "7KB": 7000}
    for given, count in sizes.items():
        assert byte_size("kv_memory", given) == count
        assert EngineConfig(kv_memory=given).kv_bytes == count


@pytest.mark.parametrize(
    "given", [0, -1, 2.5, True, "", "2G", "GiB", "0GiB", "-2GiB", "2 GiB of", "1e9", "nan", "0.1"]
)
def test_what_is_no_size_is_refused_with_the_units(given):
    with pytest.raises(ConfigError, match=r"^expected kv_memory .* GiB, .*: write it as 2GiB$"):
        EngineConfig(kv_memory=given)


def test_both_blocks_and_memory_are_refused():
    with pytest.raises(ConfigError, match=r"num_blocks or kv_memory, got both, 9 and '1GiB'"):
        EngineConfig(num_blocks=9, kv_memory="1GiB")


def test_blocks_that_are_given_are_taken(model, free):
    free(1)
    size = _size(model, num_blocks=40)
    assert size == CacheSize("float32", 40 * BLOCK, 40, 39 * 4, "num_blocks")


def test_memory_that_is_given_is_filled_with_whole_blocks(model, free):
    free(1)
    size = _size(model, kv_memory=10 * BLOCK + 1)
    assert (size.blocks, size.bytes, size.why) == (10, 10 * BLOCK, "kv_memory")
    assert (
        _size(model, kv_memory="1MiB").bytes <= MIB < _size(model, kv_memory="1MiB").bytes + BLOCK
    )


def test_memory_for_less_than_a_block_is_refused_with_what_two_take(model):
    assert _size(model, kv_memory=2 * BLOCK).blocks == 2
    with pytest.raises(ConfigError, match=rf"at least {2 * BLOCK:,} bytes.*got {2 * BLOCK - 1:,}"):
        _size(model, kv_memory=2 * BLOCK - 1)


def test_memory_that_no_machine_has_is_refused(model):
    with pytest.raises(ConfigError, match=r"not enough memory: .*kv_memory \(--kv-memory\)"):
        _size(model, kv_memory="99999999GiB")


def test_by_default_no_more_is_taken_than_requests_of_full_context_fill(model, free):
    free(10**12)
    size = _size(model)
    assert size.blocks == 1 + 4 * 16 and size.why == "max_seqs requests of full context"


def test_by_default_a_small_model_has_256_mib_and_a_large_one_four_times_its_weights(
    model, free, monkeypatch
):
    free(10**12)
    many = {"max_seqs": 10**6, "max_tokens_per_step": 10**6}
    small = _size(model, **many)
    assert (
        small.bytes == pytest.approx(256 * MIB, abs=2 * BLOCK) and small.why == "256 MiB, the least"
    )
    weights = sum(each.numel() * each.itemsize for each in model.parameters())
    monkeypatch.setattr(cache_size, "_LEAST_BYTES", weights)
    large = _size(model, **many)
    assert large.bytes == pytest.approx(4 * weights, abs=2 * BLOCK)
    assert large.why == "4 times the weights"


@pytest.mark.parametrize(("weights", "least", "most"), [("int4", 4, 4.6), ("int8", 8, 8.6)])
def test_rounded_weights_count_as_they_are_stored(free, monkeypatch, weights, least, most):
    free(10**12)
    monkeypatch.setattr(cache_size, "_LEAST_BYTES", 1)
    model = tiny_model("llama", num_hidden_layers=1)
    numbers = sum(each.numel() for each in packable(model))
    others = 4 * (sum(each.numel() for each in model.parameters()) - numbers)
    config = {"weights": weights, "max_seqs": 10**6, "max_tokens_per_step": 10**6}
    before = _size(model, **config).bytes
    pack_linears(model, contextlib.ExitStack(), as_rounded(weights))
    assert not packable(model)
    after = _size(model, **config).bytes
    for size in (before, after):
        bits = 8 * (size / 4 - others) / numbers
        assert least - 0.1 < bits < most


@pytest.mark.parametrize("count", [64 * MIB, 65 * MIB, 127 * MIB])
def test_by_default_half_of_what_is_free_is_the_most_and_the_same_at_the_next_start(
    model, free, count
):
    free(count)
    size = _size(model, max_seqs=10**6, max_tokens_per_step=10**6)
    assert size.bytes == pytest.approx(32 * MIB, abs=2 * BLOCK)
    assert size.why == "half of 0.1 GiB free, as a power of two"


def test_one_request_of_full_context_always_fits(model, free):
    free(3)
    size = _size(model)
    assert size.blocks == 1 + 16 and size.why == "one request of full context"


def test_where_nobody_says_what_is_free_the_weights_decide(model, free):
    free(None)
    assert _size(model, max_seqs=10**6, max_tokens_per_step=10**6).why == "256 MiB, the least"


def test_the_default_model_takes_what_it_always_took():
    """So that tests, examples and `make run` stay small."""
    size = CacheSize.of(default_model(), EngineConfig(), 8192)
    assert size.bytes <= 256 * MIB + 2**18


def test_the_report_says_what_was_chosen_and_why(model):
    engine = Engine(
        model, EngineConfig(16, 4, block_size=4, kv_memory="80KiB", backend="eager", max_graphs=3)
    )
    engine.warmup()
    list(engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=2)))
    assert engine.report().to_dict()["kv_cache"] == {
        "dtype": "float32",
        "bytes": 40 * BLOCK,
        "blocks": 40,
        "tokens": 39 * 4,
        "why": "kv_memory",
        "near_blocks": 0,
    }
    assert engine.executor.cache.bytes_per_block * 40 == 40 * BLOCK
