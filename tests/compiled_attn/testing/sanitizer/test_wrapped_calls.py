"""Wrapped kernels that are called several times in a step, or without metadata."""

from __future__ import annotations

import pytest
import torch

from compiled_attn.testing import CorruptCache, StepTokens, kv_sanitizer


def store(key, key_cache, slot_mapping):
    key_cache.view(-1, 2, 8)[slot_mapping] = key


def attend(q, k_cache, cache_seqlens=None, block_table=None):
    return q


@pytest.mark.parametrize("wrong", [0, 1])
def test_one_wrong_call_of_several_in_a_step_is_found(wrong):
    keys, new = torch.zeros(8, 4, 2, 8), torch.zeros(3, 2, 8)
    right, other = torch.tensor([20, 21, 22]), torch.tensor([20, 21, 23])
    with pytest.raises(CorruptCache) as found, kv_sanitizer([keys], block_size=4) as watch:
        checked = watch.wrap(store)
        watch.step([StepTokens("a", [1, 2, 3], 0, 3, [5])])
        for number in range(2):
            checked(new, keys, other if number == wrong else right)
    assert (found.value.kind, found.value.slot) == ("wrong_position", 23)


def test_it_is_silent_again_after_an_error():
    keys, new = torch.zeros(8, 4, 2, 8), torch.zeros(3, 2, 8)
    with kv_sanitizer([keys], block_size=4) as watch:
        checked = watch.wrap(store)
        watch.step([StepTokens("a", [1, 2, 3], 0, 3, [5])])
        checked(new, keys, torch.tensor([4, 21, 22]))
        with pytest.raises(CorruptCache):
            watch.check()
        watch.free([1])
        watch.step([StepTokens("b", [7, 2, 3], 0, 3, [6])])
        checked(new, keys, torch.tensor([24, 25, 26]))


def test_a_call_that_cannot_be_checked_is_refused():
    keys, query = torch.zeros(8, 4, 2, 8), torch.zeros(1, 2, 8)
    with kv_sanitizer([keys], block_size=4) as watch:
        checked = watch.wrap(attend)
        watch.step([StepTokens("a", [1], 0, 1, [5])])
        with pytest.raises(ValueError, match="got a call with neither"):
            checked(query, keys)
