"""The paged cache: sizes, views, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from compiled_attn import PagedKVCache


def test_block_views_share_the_flat_storage():
    cache = PagedKVCache(2, 5, 4, 3, 8)
    cache.key(1)[2 * 4 + 3] = 7.0
    assert cache.key_blocks(1)[2, 3].eq(7).all() and not cache.key(0).any()
    assert cache.key_blocks(1).shape == (5, 4, 3, 8)
    assert cache.value(1).shape == (20, 3, 8)


def test_a_cache_without_values_shares_the_key():
    cache = PagedKVCache(1, 3, 4, 1, 8, has_value=False)
    assert cache.value(0) is cache.key(0)
    assert cache.bytes_per_block == 4 * 8 * 4


def test_bytes_per_block_count_all_layers_and_both_buffers():
    assert (
        PagedKVCache(3, 4, 16, 2, 8, dtype=torch.bfloat16).bytes_per_block == 3 * 2 * 16 * 2 * 8 * 2
    )


def test_buffers_move_with_the_module_and_stay_out_of_checkpoints():
    cache = PagedKVCache(1, 3, 4, 1, 8)
    assert cache.state_dict() == {}
    assert cache.to(torch.float16).dtype == torch.float16


@pytest.mark.parametrize(
    "sizes", [(0, 2, 1, 1, 1), (1, 1, 1, 1, 1), (1, 2, 0, 1, 1), (1, 2, 1, 1, 0)]
)
def test_sizes_that_cannot_work_are_refused(sizes):
    with pytest.raises(ValueError, match="must be at least"):
        PagedKVCache(*sizes)
