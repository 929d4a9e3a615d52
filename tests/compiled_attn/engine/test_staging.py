"""A step crosses to its device in one copy, to addresses that are always the same."""

from __future__ import annotations

import pytest
import torch

from compiled_attn.engine.staging import Later, Return, Staging, staged_bytes
from tests.fake_device import counts, open_device


def fields(seed: int, tokens: int = 5) -> list[torch.Tensor | None]:
    chance = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 100, (tokens,), generator=chance)
    tables = torch.randint(0, 9, (2, 3), generator=chance, dtype=torch.int32)
    return [ids, None, tables, torch.zeros(0, dtype=torch.int64), ids.double() / 3]


@pytest.fixture
def staging() -> Staging:
    return Staging(open_device(), staged_bytes(fields(0)))


def test_every_field_arrives_in_one_copy_with_its_bits(staging):
    given = fields(1)
    before = counts()
    there = staging.stage(given)
    assert counts().since(before)[:3] == (1, 0, 0)
    assert there[1] is None
    for field, moved in zip(given, there, strict=True):
        if field is not None:
            assert moved.device.type == "fake_device" and moved.dtype == field.dtype
            assert torch.equal(moved.cpu(), field)


def test_steps_of_the_same_shapes_are_the_same_tensors(staging):
    first = staging.stage(fields(1))
    second = staging.stage(fields(2))
    assert all(a is b for a, b in zip(first, second, strict=True))
    smaller = staging.stage(fields(3, tokens=4))
    assert smaller[0].data_ptr() == first[0].data_ptr()
    assert torch.equal(smaller[2].cpu(), fields(3, tokens=4)[2])


def test_addresses_are_those_that_compiled_code_may_count_on(staging):
    assert all(
        field.data_ptr() % 64 == 0 for field in staging.stage(fields(1)) if field is not None
    )


def test_a_step_that_is_too_large_is_refused_before_anything_is_written(staging):
    staged = staging.stage(fields(1))
    with pytest.raises(ValueError, match=r"at most 192 bytes, got 320: make the staging"):
        staging.stage(fields(2, tokens=9))
    assert torch.equal(staged[0].cpu(), fields(1)[0])


def test_a_buffer_is_written_again_only_when_it_was_copied(staging):
    before = counts()
    for seed in range(3):  # without a wait between
        there = staging.stage(fields(seed))
    spent = counts().since(before)
    assert (spent.copies_in, spent.waits, spent.torn) == (3, 1, 0)
    assert torch.equal(there[0].cpu(), fields(2)[0])


def test_an_exception_between_a_copy_and_its_event_tears_nothing(staging):
    class Interrupted:
        def query(self) -> bool:
            return True

        def record(self, stream: torch.Stream) -> None:
            raise KeyboardInterrupt

    events, before = [*staging._copied], counts()
    staging._copied[:] = [Interrupted(), Interrupted()]
    for seed in range(2):
        with pytest.raises(KeyboardInterrupt):
            staging.stage(fields(seed))
    staging._copied[:] = events
    for seed in range(3):
        there = staging.stage(fields(seed))
    torch.accelerator.synchronize()
    assert counts().since(before).torn == 0
    assert torch.equal(there[0].cpu(), fields(2)[0])


def test_tokens_of_two_steps_can_be_on_their_way():
    way = Return(open_device(), 4)
    before = counts()
    first = way.send(torch.tensor([1, 2, 3]).to("fake_device"))
    second = way.send(torch.tensor([4, 5]).to("fake_device"))
    assert counts().since(before)[1:3] == (2, 0)
    assert ([*first], [*second]) == ([1, 2, 3], [4, 5])
    assert counts().since(before).waits == 0


class Recorded:
    """An event that collects the streams it was recorded on."""

    def __init__(self, streams: list[object]) -> None:
        self._streams = streams

    def query(self) -> bool:
        return True

    def record(self, stream: object) -> None:
        self._streams.append(stream)


def test_events_are_on_the_stream_of_the_tensors_device_not_of_the_current_one(
    staging, monkeypatch
):
    device, streams = open_device(), []
    way = Return(device, 4)
    staging._copied[:] = [Recorded(streams), Recorded(streams)]
    way._turns = [(buffer, Recorded(streams)) for buffer, _ in way._turns]
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda of: f"stream of {of}")
    staging.stage(fields(1))
    way.send(torch.tensor([1, 2]).to(device))
    assert streams == [f"stream of {device}"] * 2


def test_what_comes_later_is_read_once_and_when_it_is_needed():
    reads = []

    def read() -> list[int]:
        reads.append(1)
        return [1, 2, 3]

    later = Later(read)
    assert not reads
    assert (len(later), later[1], later[1:], [*later]) == (3, 2, [2, 3], [1, 2, 3])
    assert len(reads) == 1
