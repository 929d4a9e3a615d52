"""Recurrent states in slots, and the caches that have them."""

from __future__ import annotations

import pytest
import torch

from compiled_attn.cache.kv_cache import PagedKVCache
from compiled_attn.cache.state_cache import StateCache, StateShape

_CONV = StateShape("conv", (6, 3), torch.bfloat16)
_DELTA = StateShape("delta", (2, 4, 5), torch.float32)
_LAYERS = [(_CONV, _DELTA), (), (_CONV,)]


def _numbered(slots: int = 5) -> StateCache:
    states = StateCache(_LAYERS, slots)
    for buffer in states.buffers():
        buffer.copy_(torch.arange(slots).view(-1, *[1] * (buffer.dim() - 1)).expand_as(buffer))
    return states


def test_each_state_of_a_layer_has_its_shape_and_dtype():
    states = StateCache(_LAYERS, 5)
    assert [state.shape for state in states.of_layer(0)] == [(5, 6, 3), (5, 2, 4, 5)]
    assert [state.dtype for state in states.of_layer(0)] == [torch.bfloat16, torch.float32]
    assert states.of_layer(1) == ()
    assert list(dict(states.named_buffers())) == ["state_0_0", "state_0_1", "state_2_0"]
    assert not states.state_dict()
    assert states.bytes_per_slot == 2 * 6 * 3 * 2 + 2 * 4 * 5 * 4


def test_a_copy_takes_all_states_of_a_slot_and_no_other():
    states = _numbered()
    states.copy([(1, 3), (3, 4)])
    assert all(state.flatten(1)[:, 0].tolist() == [0, 1, 2, 1, 1] for state in states.buffers())
    assert all((state.flatten(1) == state.flatten(1)[:, :1]).all() for state in states.buffers())


def test_a_copy_carries_bits_of_values_that_are_not_numbers():
    states = _numbered()
    states.of_layer(0)[1][2] = torch.nan
    states.copy([(2, 1)])
    assert states.of_layer(0)[1][1].isnan().all()
    assert states.of_layer(0)[1][[0, 3, 4]].isfinite().all()


@pytest.mark.parametrize("pair", [(0, 1), (1, 0), (5, 1), (1, -1)])
def test_the_null_slot_and_slots_out_of_range_are_not_copied(pair):
    states = _numbered()
    with pytest.raises(ValueError, match=r"expected a slot in 1\.\.4"):
        states.copy([(1, 2), pair])
    assert all(state.flatten(1)[:, 0].tolist() == [0, 1, 2, 3, 4] for state in states.buffers())


def test_fill_sets_every_slot():
    states = _numbered()
    states.fill_(torch.nan)
    assert all(state.isnan().all() for state in states.buffers())


@pytest.mark.parametrize(
    ("layers", "slots", "message"),
    [
        (_LAYERS, 1, "slots"),
        ([(), ()], 4, "expected a state in one of them"),
        ([(_CONV._replace(kind="gru"),)], 4, r"layers\[0\]: expected a kind"),
        ([(), (_CONV._replace(shape=(6, 0)),)], 4, r"layers\[1\].*sizes of at least 1"),
        ([(_CONV._replace(shape=()),)], 4, "sizes of at least 1"),
    ],
)
def test_layers_and_slots_that_do_not_fit_are_refused(layers, slots, message):
    with pytest.raises(ValueError, match=message):
        StateCache(layers, slots)


def test_a_cache_has_its_states_among_its_buffers():
    cache = PagedKVCache(1, 3, 4, 2, 8, states=StateCache(_LAYERS, 5))
    names = ["key_0", "value_0", "states.state_0_0", "states.state_0_1", "states.state_2_0"]
    assert list(dict(cache.named_buffers())) == names
    assert list(cache.buffers_of(near=False)) == ["key_0", "value_0"]  # which blocks are moved in
    assert cache.bytes_per_block == 2 * 4 * 2 * 8 * 4


def test_a_cache_may_have_states_alone():
    cache = PagedKVCache(0, 3, 4, 1, 1, dtype=torch.bfloat16, states=StateCache(_LAYERS, 5))
    assert cache.bytes_per_block == 0
    assert (cache.dtype, cache.device) == (torch.bfloat16, torch.device("cpu"))
    with pytest.raises(ValueError, match="num_layers"):
        PagedKVCache(0, 3, 4, 1, 1)
