"""`torch.accelerator.Graph` on the fake device, whose graphs replay kernels on addresses only."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from graphs import (
    CaptureError,
    StaleGraph,
    WarmupManager,
    available_backends,
    capture,
    eager_between,
    linear,
)
from graphs.backends.accelerator import AcceleratorBackend
from tests.fake_device import NAME, allocated, open_device

pytestmark = [
    pytest.mark.usefixtures("no_grad"),
    pytest.mark.skipif(
        not hasattr(torch.accelerator, "Graph"), reason="torch 2.13 is the first with its Graph"
    ),
]


class Layer(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))
        self.linear = nn.Linear(3, 3)

    def forward(self, x, add):
        self.count.add_(1)
        return self.linear(x).softmax(-1) + add + self.count


@pytest.fixture(scope="module")
def device():
    if torch.cuda.is_available():
        pytest.skip("torch has one accelerator a process, and this machine's is a GPU")
    return open_device()


def recorded(function, *inputs, **options):
    return capture(function, inputs, backend="accelerator", compiler="eager", **options)


def test_replays_equal_a_cpu_at_every_size(device):
    here = Layer()
    there = Layer().to(device)
    there.load_state_dict(here.state_dict())
    graphs = {n: recorded(there, torch.zeros(n, 3, device=device), 10) for n in (64, 16, 4)}
    assert there.count.item() == 3  # recording runs nothing
    there.count.zero_()
    for rows in (4, 64, 16, 64):
        x = torch.randn(rows, 3)
        torch.testing.assert_close(graphs[rows].run(x.to(device), 10).cpu(), here(x, 10))
    assert there.count.item() == 4


def test_written_inputs_are_copied_back_and_returned_ones_returned(device):
    def function(cache, new):
        cache[0] = new
        return cache, cache.sum()

    graph = recorded(function, torch.zeros(3, 2, device=device), torch.ones(2, device=device))
    cache = torch.ones(3, 2, device=device)
    returned, total = graph.run(cache, torch.full((2,), 4.0, device=device))
    assert returned is cache and total.item() == 12
    assert cache.cpu().tolist() == [[4, 4], [1, 1], [1, 1]]


def test_what_a_recording_cannot_contain_is_an_error(device):
    with pytest.raises(CaptureError, match="not permitted while a graph is recorded"):
        recorded(lambda x: x * x.sum().item(), torch.ones(2, device=device))
    graph = recorded(lambda x: x * 2, torch.ones(2, device=device))  # nothing is left of it
    assert graph.run(torch.ones(2, device=device)).cpu().tolist() == [2, 2]


@pytest.mark.parametrize("index", [0, 1])
def test_metadata_on_the_host_is_an_input_of_marked_functions(device, index):
    @eager_between
    def varlen(x, lengths):
        return torch.stack([part.sum(0) for part in x.split(lengths.tolist())])

    def function(x, lengths):
        y = varlen(x * 2, lengths[:2])
        return varlen(y + 1, lengths[2:]) * 10

    there = torch.device(NAME, index)
    example = torch.ones(4, 2, device=there), torch.tensor([2, 2, 1, 1])
    graph = recorded(function, *example)
    for lengths in ([1, 3, 1, 1], [4, 0, 2, 0], [2, 2, 0, 2]):
        x, lengths = torch.randn(4, 2), torch.tensor(lengths)
        out = graph.run(x.to(there), lengths)
        assert out.device == there
        torch.testing.assert_close(out.cpu(), function(x, lengths))


def test_buckets_with_marked_functions_share_a_pool(device):
    @eager_between
    def attend(x, lengths):
        return torch.cat([part.softmax(0) for part in x.split(lengths.tolist())])

    def function(x, lengths):
        for layer in range(3):  # what is read after the cut was made before it
            doubled, before = x * 2, x + layer
            x = (attend(doubled - 1, lengths) + before.cos()).sin() + x
        return x, attend(x, lengths)

    manager = WarmupManager(
        function,
        linear(rows=(4, 4, 16)),
        lambda bucket: [
            torch.zeros(bucket.rows, 3, device=device),
            torch.tensor([bucket.rows, 0, 0]),
        ],
        backend="accelerator",
        compiler="eager",
    )
    manager.warmup()
    generator = torch.Generator().manual_seed(0)
    for rows in (4, 16, 8, 4, 12, 16):
        first = int(torch.randint(rows, (1,), generator=generator))
        lengths = torch.tensor([first, rows - first - 1, 1])
        x = torch.randn(rows, 3, generator=generator)
        got = manager({"rows": rows}, x.to(device), lengths)
        torch.testing.assert_close([each.cpu() for each in got], [*function(x, lengths)])


@pytest.mark.parametrize("reads", [lambda x, n: x * n.sum(), lambda x, n: x * int(n[0])])
def test_an_input_on_the_host_that_a_segment_reads_is_refused(device, reads):
    marked = eager_between(lambda x: x + 1)
    example = torch.ones(4, 2, device=device), torch.tensor([2, 2])
    with pytest.raises(CaptureError, match=r"input 'n' is on the host .* in a recorded segment"):
        recorded(lambda x, n: reads(marked(x), n), *example)
    with pytest.raises(CaptureError, match="input 1 is on cpu; expected all tensors on fake_dev"):
        recorded(lambda x, n: reads(x, n), *example)


def test_what_a_marked_function_returns_on_the_host_is_not_for_segments(device):
    counts = eager_between(lambda x: x.sum(0).cpu())
    adds = eager_between(lambda x, n: x + n.tolist()[0])

    def function(x):
        return adds(x, counts(x)) * 2

    graph = recorded(function, torch.ones(3, 1, device=device))
    x = torch.randn(3, 1)
    torch.testing.assert_close(graph.run(x.to(device)).cpu(), function(x))
    with pytest.raises(CaptureError, match="what '<lambda>' returned is on the host"):
        recorded(lambda x: x * counts(x)[0], torch.ones(3, 1, device=device))


def test_memory_of_recordings_is_shared_and_freed_at_the_end(device):
    layer = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))).to(device)
    before = allocated()
    example = torch.zeros(256, 64, device=device)
    graphs = [recorded(layer, example, fresh_outputs=True)]
    first = allocated() - before
    graphs += [recorded(layer, example, fresh_outputs=True) for _ in range(3)]
    assert allocated() - before < 3 * first  # each has outputs of its own
    for _ in range(50):
        graphs[-1].run(example)
    assert allocated() - before < 3 * first
    for graph in graphs:
        graph.close()
    del graphs, graph, example, layer
    assert allocated() < before


def test_a_manager_serves_its_buckets_and_a_changed_module_is_stale(device):
    layer = Layer().to(device)
    manager = WarmupManager(
        layer,
        linear(rows=(8, 8, 32)),
        lambda bucket: [torch.zeros(bucket.rows, 3, device=device), 10],
        backend="accelerator",
        compiler="eager",
    )
    manager.warmup()
    layer.count.zero_()
    x = torch.randn(16, 3, device=device)
    out = manager({"rows": 16}, x, 10).cpu()
    layer.count.zero_()
    torch.testing.assert_close(out, layer(x, 10).cpu())
    graph = recorded(layer, x, 10)
    layer.linear = nn.Linear(3, 3).to(device)
    with pytest.raises(StaleGraph):
        graph.run(x, 10)


def test_why_it_is_not_available_is_said(monkeypatch):
    accelerator = SimpleNamespace(is_available=lambda: False, current_accelerator=lambda: None)
    monkeypatch.setattr(torch, "accelerator", accelerator)
    assert "install 2.13 or newer" in available_backends()["accelerator"]

    def no_graphs():
        raise RuntimeError("Graph is not supported on device type: mps")

    accelerator.Graph = no_graphs
    assert "sees no accelerator" in AcceleratorBackend().available()
    accelerator.is_available = lambda: True
    assert "not supported on device type: mps; use" in AcceleratorBackend().available()
