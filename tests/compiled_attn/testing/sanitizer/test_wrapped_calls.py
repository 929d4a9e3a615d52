"""Wrapped kernels that are called several times in a step, or without metadata."""

from __future__ import annotations

from contextlib import nullcontext

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


@pytest.mark.parametrize("shape", [(32, 2, 8), (32, 4, 8), (32, 2, 4), (8, 64), (32, 2, 1, 8)])
def test_slots_that_may_be_taken_for_blocks_are_refused(shape):
    keys = torch.zeros(shape)
    remedy = pytest.raises(ValueError, match=f"{shape[0] // 4} if axis 0 is slots")
    with remedy, kv_sanitizer([keys], block_size=4):
        pass
    wrong = pytest.raises(ValueError, match="expected 9 blocks or 36 slots on axis 0")
    with wrong, kv_sanitizer([keys], block_size=4, num_blocks=9):
        pass
    with kv_sanitizer([keys], block_size=4, num_blocks=8) as watch:
        checked = watch.wrap(lambda key_cache, slot_mapping: None)
        watch.step([StepTokens("a", [1, 2, 3], 0, 3, [5])])
        checked(keys, torch.tensor([20, 21, 22]))


@pytest.mark.parametrize(("window", "block", "found"), [
    (4, 0, None), (4, 7, None), (6, 0, "stale_table"), (None, 0, "stale_table"),
])  # fmt: skip
def test_blocks_before_a_window_may_be_anything(window, block, found):
    keys, new = torch.zeros(8, 4, 2, 8), torch.zeros(8, 2, 8)
    with kv_sanitizer([keys], block_size=4) as watch:
        write, read = watch.wrap(store), watch.wrap(attend, window=window)
        watch.step([StepTokens("a", range(9), 0, 8, [5, 2, 3])])
        write(new, keys, torch.tensor([20, 21, 22, 23, 8, 9, 10, 11]))
        watch.step([StepTokens("a", range(9), 8, 1, [5, 2, 3])])
        write(new[:1], keys, torch.tensor([12]))
        read(new, keys, torch.tensor([9]), torch.tensor([[block, 2, 3]]))
        with nullcontext() if found is None else pytest.raises(CorruptCache, match=found):
            watch.check()
        read(new, keys, torch.tensor([9]), torch.tensor([[5, 5, 3]]))
        with pytest.raises(CorruptCache):
            watch.check()


@pytest.mark.parametrize("wrong", [0, 1])
def test_prompts_and_decodes_apart_are_steps_of_their_own_in_each_layer(wrong):
    layers, new = torch.zeros(2, 8, 4, 2, 8), torch.zeros(5, 2, 8)
    prompt, first = (StepTokens("a", range(5), 0, 5, [5, 2]), StepTokens("b", [1, 2], 0, 1, [3]))
    decode = StepTokens("b", [1, 2], 1, 1, [3])
    calls = (prompt, [20, 21, 22, 23, 8], 5, [5, 2]), (decode, [13], 2, [3, 0])
    with pytest.raises(CorruptCache) as found, kv_sanitizer([*layers], block_size=4) as watch:
        write, read = watch.wrap(store), watch.wrap(attend)
        watch.step([first])
        for keys in layers:
            write(new[:1], keys, torch.tensor([12]))
        for number, keys in enumerate(layers):
            for part, slots, length, table in calls:
                watch.step([part])
                write(new[: len(slots)], keys, torch.tensor(slots))
                watch.check()
                read_by = [6, 0] if part is decode and number == wrong else table
                read(new, keys, torch.tensor([length]), torch.tensor([read_by]))
    assert (found.value.request, found.value.layer, found.value.block) == ("b", wrong, 6)


@pytest.mark.parametrize(("read_by", "wrong"), [
    ((0, 1, 2), None), ((0, 0, 2), 1), ((0, 1, 0), 2), ((), None),
])  # fmt: skip
def test_attention_that_reads_the_cache_of_another_layer_is_found(read_by, wrong):
    layers, new = torch.zeros(3, 8, 4, 2, 8), torch.zeros(3, 2, 8)
    with kv_sanitizer([*layers], block_size=4) as watch:
        write, read = watch.wrap(store), watch.wrap(attend)
        for step in range(2):
            watch.step([StepTokens("a", range(4), 3 * step, 3 - 2 * step, [5])])
            for layer, keys in enumerate(layers):
                slots = torch.arange(20, 23) if step == 0 else torch.tensor([23])
                write(new[: len(slots)], keys, slots)
                if read_by:
                    # The slots are right, and have the same tags in each layer.
                    of = layer if step == 0 else read_by[layer]
                    read(new, layers[of], torch.tensor([3 + step]), torch.tensor([[5]]))
        watch.check()  # there could be more calls
        with nullcontext() if wrong is None else pytest.raises(CorruptCache) as found:
            watch.step([StepTokens("b", [7], 0, 1, [6])])
    if wrong is not None:
        assert (found.value.kind, found.value.layer) == ("wrong_layer", wrong)
        assert (found.value.step, found.value.request) == (2, "a")


def test_a_call_that_cannot_be_checked_is_refused():
    keys, query = torch.zeros(8, 4, 2, 8), torch.zeros(1, 2, 8)
    with kv_sanitizer([keys], block_size=4) as watch:
        checked = watch.wrap(attend)
        watch.step([StepTokens("a", [1], 0, 1, [5])])
        with pytest.raises(ValueError, match="got a call with neither"):
            checked(query, keys)
