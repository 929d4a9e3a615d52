"""The fake device refuses and counts what tests of host code need to see."""

from __future__ import annotations

import pytest
import torch

from tests.fake_device import allocated, counts, open_device

SYNCHRONIZES = pytest.mark.skipif(
    torch.__version__ < (2, 12), reason="torch 2.11 waits for no device that has no lazy start"
)


@pytest.fixture
def device() -> torch.device:
    return open_device()


@pytest.fixture
def ones(device) -> torch.Tensor:
    return torch.ones(3, 4).to(device)


def test_results_are_bit_for_bit_those_of_the_cpu(device):
    host = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    there = host.to(device)
    for function in (
        lambda x: (x @ x.T).softmax(-1),
        lambda x: x[1:, ::2].transpose(0, 1).exp().cumsum(0),
        lambda x: x.sort(descending=True).values.to(torch.float8_e4m3fn).view(torch.uint8),
        lambda x: torch.cat([x, x.view(8, 5).reshape(5, 8)], 1).to(torch.bfloat16),
        lambda x: x.unflatten(1, (2, 4)).amax(1),
    ):
        assert torch.equal(function(there).cpu(), function(host))


def test_views_share_memory_and_writes_in_place_are_seen_through_them(ones):
    row = ones[1]
    row.mul_(3)
    ones.view(-1)[::4].add_(1)
    assert ones.cpu().tolist() == [[2, 1, 1, 1], [4, 3, 3, 3], [2, 1, 1, 1]]
    torch.cat([row, row], out=(out := torch.empty(0, device=ones.device)))
    assert out.cpu().tolist() == [4, 3, 3, 3] * 2


def test_tensors_of_two_devices_are_refused(ones):
    host = torch.ones(3, 4)
    for call in (
        lambda: ones + host,
        lambda: torch.matmul(ones, host.T),
        lambda: ones[torch.tensor([0, 1])],
        lambda: ones.index_copy_(0, torch.tensor([0]), host[:1]),
    ):
        with pytest.raises(RuntimeError, match=r"one device|same device"):
            call()
    assert (ones + torch.tensor(2.0)).sum().item() == 36  # a number is of no device


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda x: x.copy_(torch.zeros(3, 4)), "copies_in"),
        (lambda x: x.cpu(), "copies_out"),
        (lambda x: x.tolist(), "copies_out"),
        (lambda x: x.sum().item(), "waits"),
        (lambda x: bool(x.any()), "waits"),
        (lambda x: x[x > 0], "waits"),
        (lambda x: x.nonzero(), "waits"),
        pytest.param(lambda x: torch.accelerator.synchronize(), "waits", marks=SYNCHRONIZES),
        (lambda x: x.clone().add_(1), ""),
    ],
)
def test_copies_and_waits_are_counted(ones, call, kind):
    before = counts()
    call(ones)
    spent = counts().since(before)._asdict()
    assert [name for name in ("copies_in", "copies_out", "waits") if spent[name]] == [kind] * bool(
        kind
    )


def test_numpy_cannot_read_it(ones):
    with pytest.raises(TypeError):
        ones.numpy()


def test_a_copy_without_a_wait_finishes_as_late_as_possible(ones):
    here, arrived = torch.zeros(3, 4), torch.Event(ones.device)
    before = counts()
    here.copy_(ones, non_blocking=True)
    arrived.record()
    ones.add_(1)  # after the copy
    late = here.clone()
    assert not arrived.query()
    arrived.synchronize()
    assert arrived.query() and not (late == 1).any() and (here == 1).all()
    assert counts().since(before)[:3] == (0, 1, 0)  # to wait for a copy out is part of it
    arrived.record()
    arrived.synchronize()
    assert counts().since(before).waits == 1


@pytest.mark.skipif(
    not hasattr(torch.accelerator, "Graph"), reason="torch 2.13 is the first with its Graph"
)
def test_a_graph_records_without_running_and_replays_on_addresses(device):
    def record(call, pool=None):
        graph = torch.accelerator.Graph(pool=pool)
        graph.capture_begin()
        try:
            return graph, call()
        finally:
            graph.capture_end()

    x, count = (torch.ones(16).to(device) for _ in range(2))
    before = allocated()
    graph, out = record(lambda: (count.add_(1), x * count, torch.cat([x, x])[:16])[1:])
    assert count.cpu().eq(1).all()
    x.fill_(3)
    for run in (2, 3):
        graph.replay()
        assert count.cpu().eq(run).all() and out[0].cpu().eq(3 * run).all()
    assert out[1].cpu().eq(3).all()
    for forbidden in (
        x.cpu,
        lambda: x.sum().item(),
        lambda: x[x > 0],
        torch.accelerator.synchronize,
    ):
        with pytest.raises(RuntimeError, match="not permitted while a graph is recorded"):
            record(forbidden)
    assert torch.equal(x.cpu(), torch.full((16,), 3.0))
    freed = out[0].data_ptr()
    del out
    again, out = record(lambda: x + 1, graph.pool())
    other, apart = record(lambda: x + 1)
    assert out.data_ptr() == freed and apart.data_ptr() != freed
    for each in (graph, again, other):
        each.reset()
    del out, apart
    assert allocated() == before


@SYNCHRONIZES
@pytest.mark.parametrize("waits", [False, True])
def test_a_source_that_is_changed_before_its_copy_was_waited_for_is_torn(ones, waits):
    source = torch.zeros(3, 4)
    before = counts()
    ones.copy_(source, non_blocking=True)
    if waits:
        torch.accelerator.synchronize()
    source.add_(1)
    torch.accelerator.synchronize()
    assert counts().since(before).torn == (not waits)


def test_each_of_two_has_an_order_of_its_own_and_refuses_the_tensors_of_the_other(device, ones):
    other = torch.ones(3, 4, device="fake_device:1")
    assert (other + 1).device == torch.device("fake_device:1") != ones.device
    with pytest.raises(RuntimeError, match="same device"):
        ones + other
    here, arrived = torch.zeros(3, 4), torch.Event(other.device)
    here.copy_(other, non_blocking=True)
    arrived.record()  # of the current device, which copied nothing
    arrived.synchronize()
    assert not (here == 1).any()
    arrived = torch.Event(other.device)
    arrived.record(torch.accelerator.current_stream(other.device))
    arrived.synchronize()
    assert (here == 1).all()
    with torch.accelerator.device_index(1):
        assert torch.zeros(1, device="fake_device").device == other.device
