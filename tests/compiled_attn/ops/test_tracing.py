"""Which caches a compiled graph may write to as tensors of their own, and when numbers are read."""

from __future__ import annotations

import torch
from torch._subclasses import FakeTensorMode

from compiled_attn.ops.tracing import can_read, stands_alone


def test_only_a_dense_tensor_of_its_own_stands_alone():
    cache = torch.zeros(4, 3, 2)
    assert stands_alone(cache) and stands_alone(torch.empty_strided((4, 3, 2), (2, 8, 1)))
    assert not stands_alone(cache[1:]) and not stands_alone(cache.transpose(0, 1))
    assert not stands_alone(torch.empty_strided((4, 3, 2), (12, 4, 1)))


def test_numbers_are_read_in_eager_mode_only():
    assert can_read(torch.zeros(2)) and not can_read(torch.zeros(2, device="meta"))
    with FakeTensorMode():
        assert not can_read(torch.zeros(2))
    traced = torch.compile(lambda x: x + can_read(x), backend="eager", fullgraph=True)
    assert traced(torch.zeros(1)).item() == 0
