import gc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphs.torch_internals.replay.memory import Allocation, InputMemory, assign_offsets


def test_an_allocation_is_freed_with_its_last_tensor():
    tensor = torch.empty(4, 6)
    made = Allocation(tensor[1:], 3)
    assert (made.address, made.bytes) == (tensor.data_ptr(), 96)
    assert (made.begin, made.end, made.is_freed) == (3, 3, False)
    assert made.contains(tensor.data_ptr() + 95) and not made.contains(tensor.data_ptr() + 96)
    view = tensor[2:]
    del tensor
    gc.collect()
    assert not made.is_freed
    del view
    gc.collect()
    assert made.is_freed


def test_an_address_is_found_in_its_input():
    a, b = torch.empty(4, 6), torch.empty(5, dtype=torch.int64)
    given = InputMemory([3, a[1:, 2:], b, torch.empty(0), None])
    assert given.find(a[1, 2].data_ptr()) == (1, 0)
    assert given.find(a[3, 5].data_ptr() + 3) == (1, 4 * (2 * 6 + 3) + 3)
    assert given.find(b.data_ptr() + 39) == (2, 39)
    for outside in (0, a.data_ptr(), a[1, 1].data_ptr(), a[3, 5].data_ptr() + 4, b.data_ptr() + 40):
        assert given.find(outside) is None


def test_an_address_in_several_inputs_is_not_found():
    whole = torch.empty(10)
    given = InputMemory([whole[:6], whole[4:]])
    assert given.find(whole[3].data_ptr()) == (0, 12)
    assert given.find(whole[4].data_ptr()) is None
    assert given.find(whole[6].data_ptr()) == (1, 8)
    assert InputMemory([whole, whole]).find(whole.data_ptr()) is None
    long = InputMemory([whole, whole[1:2], whole[2:3]])
    assert long.find(whole[9].data_ptr()) == (0, 36)
    assert long.find(whole[2].data_ptr()) is None


@given(
    st.lists(
        st.tuples(st.integers(0, 30), st.integers(1, 8), st.integers(1, 700)),
        min_size=1,
        max_size=40,
    )
)
def test_allocations_in_use_at_the_same_time_do_not_overlap(lives):
    held, made = [], []
    for begin, length, size in lives:
        held.append(torch.empty(size, dtype=torch.uint8))
        made.append(Allocation(held[-1], begin))
        made[-1].end = begin + length
    total = assign_offsets(made)
    for i, a in enumerate(made):
        assert a.offset % 64 == 0 and a.offset + a.bytes <= total
        for b in made[:i]:
            are_both_needed = a.begin < b.end and b.begin < a.end
            are_apart = a.offset + a.bytes <= b.offset or b.offset + b.bytes <= a.offset
            assert are_apart or not are_both_needed
    needed = [sum(m.bytes for m in made if m.begin <= t < m.end) for t in range(40)]
    assert max(needed) <= total


def test_memory_is_used_again():
    held = [torch.empty(1000, dtype=torch.uint8) for _ in range(10)]
    made = [Allocation(each, n) for n, each in enumerate(held)]
    for each in made:
        each.end = each.begin + 2
    assert assign_offsets(made) == 2024  # one aligned, and another behind it


@pytest.fixture(autouse=True)
def _collected():
    yield
    gc.collect()
