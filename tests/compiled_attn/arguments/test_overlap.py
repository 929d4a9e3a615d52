"""An index in memory that is written is refused before a byte is written; other layouts are not."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from compiled_attn.arguments import Expect, can_read, overlap
from tests.compiled_attn.arguments.overlap_calls import NATIVE, PORTABLE, Call, wrong

# What shares memory


def test_tensors_of_one_storage_share_memory_only_where_their_bytes_meet() -> None:
    storage = torch.zeros(64, dtype=torch.int32)
    cache, after = storage[:32].view(4, 8), storage[32:]
    assert overlap({"cache": cache}, {"after": after}) is None
    assert overlap({"after": after}, {"cache": cache}) is None
    assert overlap({"cache": cache}, {"last": storage[31:33]}) == ("last", "cache")
    assert overlap({"cache": cache}, {"inside": cache[1:2, 3:4]}) == ("inside", "cache")
    assert overlap({"inside": cache[1:2, 3:4]}, {"cache": cache}) == ("cache", "inside")


def test_other_dtypes_over_the_same_bytes_are_found() -> None:
    cache = torch.zeros(4, 8)
    assert overlap({"cache": cache}, {"bytes": cache.view(torch.uint8)[3]}) == ("bytes", "cache")
    array = cache.numpy()  # a storage of its own over the same memory
    assert overlap({"cache": cache}, {"array": torch.from_numpy(array)}) == ("array", "cache")


def test_what_lies_in_the_gaps_of_a_tensor_counts_as_a_part_of_it() -> None:
    both = torch.zeros(4, 2, 8)
    keys, values = both[:, 0], both[:, 1]
    assert overlap({"keys": keys}, {"values": values}) == ("values", "keys")
    assert overlap({"keys": keys, "values": values}, {"other": torch.zeros(3)}) is None
    # The gap after the last element belongs to nobody.
    assert overlap({"keys": keys}, {"end": both[3, 1]}) is None
    assert overlap({"keys": keys.mT}, {"end": both[3, 1]}) is None


def test_what_has_no_memory_or_is_no_tensor_shares_none() -> None:
    cache = torch.zeros(4, 8)
    read = {"none": None, "number": 3, "empty": cache[:0], "thin": cache[:, :0].T}
    assert overlap({"cache": cache, "scale": None}, read) is None
    assert overlap({"empty": cache[:0]}, {"cache": cache}) is None
    assert overlap({"scale": None}, {"cache": cache}) is None
    meta = torch.zeros(4, device="meta")
    assert overlap({"meta": meta}, {"meta": meta}) is None
    with FakeTensorMode():
        fake = torch.zeros(4)
        assert overlap({"fake": fake}, {"fake": fake}) is None


def test_an_expanded_tensor_is_as_long_as_what_it_repeats() -> None:
    numbers = torch.zeros(8, dtype=torch.int32)
    assert overlap({"cache": numbers[1:]}, {"one": numbers[:1].expand(100)}) is None
    assert overlap({"cache": numbers[1:]}, {"one": numbers[1:2].expand(100)}) is not None


def test_the_error_says_expected_got_remedy() -> None:
    cache = torch.zeros(4)
    message = r"^op: expected table apart from cache, got shared memory: call \.clone\(\)$"
    expect = Expect(ValueError, TypeError, "op: ")
    with pytest.raises(ValueError, match=message):
        expect.apart({"cache": cache}, {"table": cache[1:]})
    expect.apart({"cache": cache}, {"table": cache[1:].clone()})


def test_nothing_is_compared_and_nothing_breaks_inside_of_a_compiled_graph() -> None:
    def step(cache: Tensor, table: Tensor) -> Tensor:
        Expect(ValueError, TypeError).apart({"cache": cache}, {"table": table})
        return cache + table

    cache = torch.zeros(4)
    compiled = torch.compile(step, backend="eager", fullgraph=True)
    assert torch.equal(compiled(cache, cache), cache)


def test_numbers_are_read_in_eager_mode_only() -> None:
    assert can_read(torch.zeros(2)) and not can_read(torch.zeros(2, device="meta"))
    with FakeTensorMode():
        assert not can_read(torch.zeros(2))
    traced = torch.compile(lambda x: x + can_read(x), backend="eager", fullgraph=True)
    assert traced(torch.zeros(1)).item() == 0


# Everything that writes


@pytest.mark.parametrize("name", PORTABLE)
def test_an_index_in_written_memory_is_refused_before_anything_is_written(name: str) -> None:
    assert list(wrong(PORTABLE[name])) == []


def test_the_native_kernel_refuses_them_instead_of_crashing(ops: object) -> None:
    command = [sys.executable, "-m", "tests.compiled_attn.arguments.overlap_calls", "native"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr[-2000:]


def calls(kernel: str, request: pytest.FixtureRequest) -> dict[str, Callable[[], Call]]:
    if kernel == "native":
        request.getfixturevalue("ops")
    return {"portable": PORTABLE, "native": NATIVE}[kernel]


def in_one_storage(call: Call) -> Call:
    """The same call, all that it writes and reads packed into one piece of memory."""
    names = [*call.written, *call.indices]
    sizes = [-(-call.arguments[name].nbytes // 64) * 64 for name in names]
    memory = torch.zeros(sum(sizes), dtype=torch.uint8)
    packed = dict(call.arguments)
    for name, part in zip(names, memory.split(sizes), strict=True):
        old = call.arguments[name]
        packed[name] = part[: old.nbytes].view(old.dtype).view(old.shape).copy_(old)
    return Call(call.function, packed, call.written, call.indices)


def equal(first: object, second: object) -> bool:
    if isinstance(first, tuple) and isinstance(second, tuple):
        return all(equal(a, b) for a, b in zip(first, second, strict=True))
    assert isinstance(first, Tensor) and isinstance(second, Tensor)
    return torch.equal(first, second)


@pytest.mark.parametrize("kernel", ["portable", "native"])
def test_indices_elsewhere_in_the_same_storage_are_served(kernel, request):
    for make in calls(kernel, request).values():
        call = make()
        packed = in_one_storage(call)
        result, expected = packed.run(), call.run()
        assert expected is None or equal(result, expected)
        for written in call.written:
            mine, theirs = call.arguments[written], packed.arguments[written]
            assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("kernel", ["portable", "native"])
def test_interleaved_keys_and_values_are_served(kernel, request):
    torch.manual_seed(0)
    call = next(iter(calls(kernel, request).values()))()
    both = torch.zeros(8, 2, *call.arguments["key_cache"].shape[1:])
    interleaved = {**call.arguments, "key_cache": both[:, 0], "value_cache": both[:, 1]}
    assert equal(call.function(**interleaved), call.run())
