"""Caches that a compiled graph may write to as tensors of their own."""

from __future__ import annotations

import torch

from compiled_attn.ops.rows import stands_alone


def test_only_a_dense_tensor_of_its_own_stands_alone():
    cache = torch.zeros(4, 3, 2)
    assert stands_alone(cache) and stands_alone(torch.empty_strided((4, 3, 2), (2, 8, 1)))
    assert not stands_alone(cache[1:]) and not stands_alone(cache.transpose(0, 1))
    assert not stands_alone(torch.empty_strided((4, 3, 2), (12, 4, 1)))
