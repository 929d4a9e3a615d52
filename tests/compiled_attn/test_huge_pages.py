"""Buffers on huge pages are ordinary tensors of zeros."""

import copy

import pytest
import torch

from compiled_attn import PagedKVCache, huge_pages


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(3, 5), (1 << 12, 4, 300)])
def test_buffers_are_zero_and_can_be_written(dtype, shape):
    buffer = huge_pages.zeros(shape, dtype)
    assert buffer.shape == shape and buffer.dtype == dtype and buffer.is_contiguous()
    assert not buffer.view(torch.uint8).any()
    buffer.view(torch.uint8)[-1] = 7
    assert copy.deepcopy(buffer).view(torch.uint8)[-1].eq(7).all()


def test_a_system_without_huge_pages_gives_plain_zeros(monkeypatch):
    monkeypatch.setattr(huge_pages, "_ADVICE", None)
    assert huge_pages.zeros((1 << 20, 4), torch.float32).count_nonzero() == 0


def test_a_refused_advice_gives_plain_zeros(monkeypatch):
    monkeypatch.setattr(huge_pages, "_ADVICE", 10_000)  # no such advice
    assert huge_pages.zeros((1 << 20, 4), torch.float32).count_nonzero() == 0


def test_buffers_of_other_devices_are_left_to_torch():
    assert huge_pages.zeros((1 << 20, 4), torch.float32, "meta").is_meta


def test_a_buffer_outlives_what_made_it():
    key = PagedKVCache(1, 1 << 10, 16, 2, 64).key(0)
    key.fill_(2.0)
    assert key.sum() == 2.0 * key.numel()
