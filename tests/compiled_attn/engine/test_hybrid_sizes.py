"""Sizes of slots for recurrent states, and what engines of models with states refuse."""

from __future__ import annotations

import pytest

from compiled_attn.engine import ConfigError, Engine, EngineConfig, cache_size
from compiled_attn.engine.cache_size import CacheSize, StateSize
from compiled_attn.engine.sizing import Sizing
from compiled_attn.models.hf import cache_for
from compiled_attn.step import PartsLayout, TableLayout
from tests.compiled_attn.models.hf.families import small_model
from tests.compiled_attn.tiny import tiny_model

SLOT = 1000
"""Bytes of the states of a request."""


@pytest.fixture(scope="module")
def hybrid():
    return small_model("lfm2")


@pytest.fixture
def free(monkeypatch):
    """Sets the bytes that the machine has free, and in all."""

    def set_bytes(count):
        monkeypatch.setattr(cache_size, "free_bytes", lambda device: count)
        monkeypatch.setattr(cache_size, "machine_bytes", lambda device: count)

    return set_bytes


def _states(**config) -> StateSize:
    config = {"max_seqs": 4, "block_size": 4, **config}
    return StateSize.of(tiny_model(), EngineConfig(**config), SLOT, step=26)


def test_there_are_as_many_snapshots_as_requests_or_as_the_memory_holds(free):
    free(2**30)
    assert _states() == StateSize(running=4, snapshots=4, snapshot_every=6, bytes_per_slot=SLOT)
    assert (_states().slots, _states().bytes) == (9, 9 * SLOT)
    assert _states(state_memory=7 * SLOT + 1).snapshots == 7
    assert _states(state_memory="9KB", snapshot_every=2) == StateSize(4, 9, 2, SLOT)
    assert _states(state_memory=0).snapshots == _states(state_memory="0").snapshots == 0
    assert _states(max_tokens_per_step=4).snapshot_every == 6
    free(33 * SLOT)  # half of the power of two below half of it holds 8 slots
    assert _states().snapshots == 3
    free(20 * SLOT)
    assert _states().snapshots == 0
    assert _states(kv_memory=14 * SLOT).snapshots == 2


def test_states_that_do_not_fit_are_refused_with_their_bytes(free):
    free(8 * SLOT)
    message = r"does not fit: .* at most 8,000 bytes.* 9,000 bytes for 9 slots of 1,000 .*max_seqs"
    with pytest.raises(ConfigError, match=message):
        _states(state_memory=4 * SLOT)


def test_states_share_the_memory_of_the_cache(hybrid, free):
    free(2**30)
    slot = cache_for(hybrid, 2, 1)
    block, states = 4 * slot.bytes_per_block, StateSize(2, 2, 1, 10_000)
    given = {"block_size": 4, "max_seqs": 2}

    def size(states: StateSize | None, **config) -> CacheSize:
        config = EngineConfig(**given, **config)
        return CacheSize.of(hybrid, config, 64, slot=slot, step=16, states=states)

    memory = 50_000 + 30 * block
    assert size(None, kv_memory=memory).blocks == 30 + 50_000 // block
    assert size(states, kv_memory=memory).blocks == 30
    assert size(states, kv_memory=memory).bytes == 30 * block
    assert size(states) == size(None)  # 4 times the weights hold all contexts
    least = 50_000 + 2 * block
    message = f"at least {least:,} bytes, 50,000 of them for states.* or state_memory"
    with pytest.raises(ConfigError, match=message):
        size(states, kv_memory=least - 1)
    with pytest.raises(ConfigError, match="not enough memory"):
        size(states, num_blocks=(2**30 - 1000) // block)


def test_blocks_without_keys_take_no_memory(free):
    free(2**30)
    model = small_model("mamba")
    config = EngineConfig(block_size=4, max_seqs=3, context=50)
    size = Sizing.of(model, config, TableLayout)
    assert size.num_blocks == 1 + 3 * 13 and size.cache.bytes == 0
    assert size.layout.has_states and size.states.running == 3


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"speculate": "ngram:3"}, "no speculate, as states cannot be rolled back: got 'ngram:3'"),
        ({"backend": "onnxrt"}, "need a backend that captures ops on states: got onnxrt"),
    ],
)
def test_settings_that_states_do_not_allow_are_refused_by_name(hybrid, config, message):
    with pytest.raises(ConfigError, match=f"a Lfm2ForCausalLM has recurrent states.*{message}"):
        Sizing.of(hybrid, EngineConfig(context=64, **config), TableLayout)


def test_several_ranks_and_the_portable_kernel_are_refused_by_name(hybrid):
    config = EngineConfig(context=64)
    with pytest.raises(ConfigError, match="which need one process: got 2 ranks"):
        Sizing.of(hybrid, config, TableLayout, ranks=2)
    with pytest.raises(ConfigError, match="which need the native kernel: got the portable one"):
        Sizing.of(hybrid, config, PartsLayout)
    with pytest.raises(ConfigError, match="which need the native kernel"):
        Engine(hybrid, EngineConfig(context=64, kernel="portable", backend="eager"))


def test_a_draft_model_with_states_is_refused(hybrid):
    with pytest.raises(ConfigError, match=r"draft model .* Lfm2ForCausalLM, which has recurrent"):
        Sizing.of(tiny_model(), EngineConfig(context=64), TableLayout, draft=hybrid)


@pytest.mark.parametrize("given", [{"state_memory": 0}, {"snapshot_every": 3}])
def test_settings_of_states_are_refused_for_models_without(given):
    with pytest.raises(ConfigError, match=f"for {next(iter(given))}, got a LlamaForCausalLM"):
        Sizing.of(tiny_model(), EngineConfig(**given), TableLayout)


@pytest.mark.parametrize("given", [{"state_memory": "2G"}, {"snapshot_every": 0}])
def test_settings_that_are_no_sizes_are_refused(given):
    with pytest.raises(ConfigError, match=next(iter(given))):
        EngineConfig(**given)
