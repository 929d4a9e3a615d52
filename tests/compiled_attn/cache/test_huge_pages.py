"""Buffers on huge pages are ordinary tensors of zeros."""

import copy
import resource
import threading

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from compiled_attn import PagedKVCache
from compiled_attn.cache import huge_pages


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(3, 5), (1 << 12, 4, 300)])
def test_buffers_are_zero_and_can_be_written(dtype, shape):
    buffer = huge_pages.zeros(shape, dtype)
    assert buffer.shape == shape and buffer.dtype == dtype and buffer.is_contiguous()
    assert not buffer.view(torch.uint8).any()
    buffer.view(torch.uint8)[-1] = 7
    assert copy.deepcopy(buffer).view(torch.uint8)[-1].eq(7).all()


@pytest.mark.usefixtures("one_thread")
@pytest.mark.skipif(
    not hasattr(resource, "RUSAGE_THREAD"), reason="no count of one thread's faults"
)
def test_all_pages_are_there_before_the_first_request_writes_them():
    buffer = huge_pages.zeros((1 << 26,), torch.int8)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    buffer.fill_(1)
    faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
    assert faults < 8  # of 32 huge pages


@pytest.mark.parametrize("advice", [None, 10_000])
def test_a_system_without_huge_pages_or_that_advice_gives_plain_zeros(advice, monkeypatch):
    monkeypatch.setattr(huge_pages, "_ADVICE", advice)
    assert huge_pages.zeros((1 << 20, 4), torch.float32).count_nonzero() == 0


def test_buffers_of_other_devices_are_left_to_torch():
    assert huge_pages.zeros((1 << 20, 4), torch.float32, "meta").is_meta


def test_a_buffer_outlives_what_made_it():
    key = PagedKVCache(1, 1 << 10, 16, 2, 64).key(0)
    key.fill_(2.0)
    assert key.sum() == 2.0 * key.numel()


def test_a_fake_mode_gets_fake_tensors():
    with FakeTensorMode():
        cache = PagedKVCache(1, 1 << 10, 16, 8, 64, dtype=torch.int8)
        assert all(isinstance(buffer, FakeTensor) for buffer in cache.buffers())
        assert isinstance(huge_pages.zeros((1 << 20, 8), torch.float32), FakeTensor)


def test_a_size_beyond_any_address_space_is_an_error_of_torch():
    with pytest.raises(RuntimeError):
        huge_pages.zeros((1 << 62, 8), torch.float32)


@pytest.mark.skipif(huge_pages._ADVICE is None, reason="there are no huge pages to ask for")
def test_large_buffers_of_keys_and_of_scales_are_not_for_resizing():
    cache = PagedKVCache(1, 1 << 12, 16, 8, 8, dtype=torch.int8)
    for buffer in (cache.key(0), cache.key_scale(0)):
        assert not buffer.untyped_storage().resizable()


def test_buffers_that_are_touched_later_keep_what_is_written_meanwhile():
    with huge_pages.touched_later():
        buffers = [huge_pages.zeros((1 << 24,), torch.int8) for _ in range(4)]
        buffers[0].fill_(1)
    buffers[1].fill_(2)
    for thread in [each for each in threading.enumerate() if each.name == huge_pages.THREAD]:
        thread.join()
    sums = [int(buffer.sum(dtype=torch.int64)) for buffer in buffers]
    assert sums == [1 << 24, 2 << 24, 0, 0]
