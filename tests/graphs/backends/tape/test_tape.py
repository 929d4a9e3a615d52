"""Taped graphs against eager, through a player in Python."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from torch import nn

from graphs import WarmupManager, available_backends, capture, explicit, no_compile
from graphs.backends.tape import recorder as recorder_module
from graphs.backends.tape.tape import Tapes
from graphs.store import ArtifactStore, StoredInductor
from tests.graphs.backends.tape.player_double import PlayerDouble

pytestmark = pytest.mark.usefixtures("no_grad")


@torch.compiler.nested_compile_region
def layer(x, scale):
    """Has kernels of its own, which are called again for each layer."""
    y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * scale
    return torch.softmax(y, -1).flip(0) - x.amax(0, keepdim=True)


class Step(nn.Module):
    """Several kernels with memory between them, a parameter, and a cache that is written."""

    def __init__(self, size=48):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(size))
        self.register_buffer("cache", torch.zeros(8, size))

    def forward(self, x, rows):
        for _ in range(3):
            x = layer(x, self.scale)
        self.cache.index_copy_(0, rows, x[: len(rows)])
        return x, self.cache[rows].sum(-1)


def inputs_of(tokens, size=48):
    return torch.randn(tokens, size), torch.randperm(8)[: min(tokens, 8)]


@pytest.fixture(scope="module")
def player():
    if reason := available_backends()["inductor"]:
        pytest.skip(reason)
    return PlayerDouble()


@pytest.fixture
def tapes(player):
    player.played.clear()
    player.fails = False
    return Tapes(player)


def assert_like_eager(module, graph, inputs):
    module.cache.normal_()
    own = module.cache.clone()
    expected = module(*inputs)
    written = module.cache.clone()
    module.cache.copy_(own)
    made = graph.run(*inputs)
    torch.testing.assert_close(made, expected)
    torch.testing.assert_close(module.cache, written)


def test_a_taped_graph_is_that_of_eager_wherever_its_inputs_lie(tapes, player):
    module = Step()
    graph = capture(module, inputs_of(5), tapes=tapes)
    assert (tapes.made, tapes.refused, player.played) == (1, {}, [])
    kept = []
    for run in range(4):
        kept.append(inputs_of(5))
        assert_like_eager(module, graph, kept[-1])
        assert len(player.played) == run + 1
    assert player.played[0] > 3


def test_what_is_returned_is_not_overwritten_by_the_next_run(tapes):
    module = Step()
    graph = capture(module, inputs_of(5), tapes=tapes)
    first, _ = graph.run(*inputs_of(5))
    before = first.clone()
    second, _ = graph.run(*inputs_of(5))
    assert torch.equal(first, before) and not torch.equal(first, second)


def test_parameters_and_buffers_may_be_replaced_and_moved(tapes, player):
    module = Step()
    graph = capture(module, inputs_of(5), tapes=tapes)
    module.scale.data = torch.randn(48)
    assert_like_eager(module, graph, inputs_of(5))
    module.cache = torch.zeros(8, 48)
    assert_like_eager(module, graph, inputs_of(5))
    assert len(player.played) == 2


@pytest.mark.parametrize("is_stored", [False, True])
def test_each_bucket_of_one_compile_has_a_tape(tapes, player, tmp_path, is_stored):
    module, space = Step(), explicit(("tokens",), [(2,), (5,), (8,)])
    starts = 2 if is_stored else 1
    for start in range(starts):
        tapes = Tapes(player)
        backend = StoredInductor(ArtifactStore(tmp_path / "store")) if is_stored else "inductor"
        manager = WarmupManager(
            module, space, lambda bucket: inputs_of(bucket.tokens), backend=backend,
            symbolic=("tokens",), tapes=tapes,
        )  # fmt: skip
        report = manager.warmup()
        assert report.compiles == (1 if start == 0 else 0)
        assert (tapes.made, tapes.refused) == (3, {})
        player.played.clear()
        for tokens in (5, 2, 8, 5):
            assert_like_eager(module, Bucketed(manager, tokens), inputs_of(tokens))
        assert len(player.played) == 4


class Bucketed:
    def __init__(self, manager, tokens):
        self.run = lambda *inputs: manager.run(manager.bucket(tokens=tokens), *inputs)


def test_replays_are_counted_and_compile_nothing(tapes):
    graph = capture(Step(), inputs_of(5), tapes=tapes)
    with no_compile(strict=True) as watch:
        for _ in range(3):
            graph.run(*inputs_of(5))
    assert (watch.replays, watch.compiles) == (3, 0)


def test_a_graph_whose_call_fails_runs_itself(tapes, player):
    module = Step()
    graph = capture(module, inputs_of(5), tapes=tapes)
    player.fails = True
    assert_like_eager(module, graph, inputs_of(5))
    player.fails = False
    assert_like_eager(module, graph, inputs_of(5))
    assert len(player.played) == 1


def test_a_graph_that_runs_in_two_threads_is_played_in_one(tapes, player):
    module = Step()
    graph = capture(module, inputs_of(5), tapes=tapes)
    with tapes.arena(0):
        thread = threading.Thread(target=assert_like_eager, args=(module, graph, inputs_of(5)))
        with torch.no_grad():
            assert_like_eager(module, graph, inputs_of(5))
        assert not player.played
    del thread
    assert_like_eager(module, graph, inputs_of(5))
    assert len(player.played) == 1


def test_the_memory_of_tapes_is_kept_by_graphs_that_are_not_closed(player):
    tapes, module = Tapes(player), Step()
    player.played.clear()
    gone = weakref.ref(tapes)
    graph = capture(module, inputs_of(5), tapes=tapes)
    del tapes
    gc.collect()
    assert_like_eager(module, graph, inputs_of(5))
    assert len(player.played) == 1
    graph.close()
    gc.collect()
    assert gone() is None


def test_the_loader_of_inductor_is_left_as_it_was(tapes):
    from torch._inductor.codecache import PyCodeCache

    before = vars(PyCodeCache)["load_by_key_path"]
    with tapes.taping():
        with tapes.taping():
            pass
        assert vars(PyCodeCache)["load_by_key_path"] is not before
    assert vars(PyCodeCache)["load_by_key_path"] is before
    with pytest.raises(KeyError), tapes.taping():
        raise KeyError
    assert vars(PyCodeCache)["load_by_key_path"] is before


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x):
        return x + self.count.add_(1)


def test_a_callable_runs_as_often_as_it_was_asked_to(tapes, player):
    module = Counter()
    graph = capture(module, [torch.zeros(4)], tapes=tapes)
    assert module.count.item() == 1 and tapes.made == 1
    assert graph.run(torch.ones(4)).tolist() == [3.0] * 4
    assert player.played == [1]


def test_what_does_not_repeat_itself_has_no_tape_where_it_should(player):
    tapes = Tapes(player, repeats=True)
    capture(Counter(), [torch.zeros(4)], tapes=tapes)
    assert (tapes.made, [*tapes.refused]) == (0, ["played again, it makes something else"])


def test_what_repeats_itself_is_compared_before_it_serves(player):
    tapes, module = Tapes(player, repeats=True), Step()
    player.played.clear()
    graph = capture(module, inputs_of(5), tapes=tapes)
    assert (tapes.made, len(player.played)) == (1, 1)
    assert_like_eager(module, graph, inputs_of(5))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: torch.relu(x @ x.T) + 1, "aten.mm"),
        (lambda x: torch.sort(x)[0], "notes no call"),
        (lambda x: x + torch.rand(4, 4), "aten.rand"),
    ],
    ids=["a product", "a sort", "random numbers"],
)
def test_what_cannot_be_taped_runs_as_it_did_and_says_why(tapes, player, function, reason):
    x = torch.randn(4, 4)
    graph = capture(function, [x], tapes=tapes)
    assert tapes.made == 0 and len(tapes.refused) == 1
    assert reason in next(iter(tapes.refused))
    y = torch.randn(4, 4)
    made = graph.run(y)
    if "rand" not in reason:
        torch.testing.assert_close(made, function(y))
    assert not player.played


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.relu(x)[1],
        lambda x: (torch.relu(x)[1:], torch.exp(x).T),
        lambda x: (y := torch.relu(x), y[2:], y.view(2, 8)),
        lambda x: torch.relu(x)[:, :0],
        lambda x: (torch.relu(x), x),
        lambda x: torch.relu(x.to(torch.bfloat16)),
        lambda x: torch.relu(x).view(torch.int32) // 2,
    ],
    ids=["a part", "several", "one memory in parts", "nothing", "an input", "another dtype", "bits"],
)
def test_what_is_returned_is_that_of_eager(tapes, player, function):
    graph = capture(function, [torch.randn(4, 4)], tapes=tapes)
    assert (tapes.made, tapes.refused) == (1, {})
    for run in range(3):
        x = torch.randn(4, 4)
        torch.testing.assert_close(graph.run(x), function(x))
        assert len(player.played) == run + 1


def test_a_kernel_of_more_arguments_than_the_player_passes_has_no_tape(player):
    few = PlayerDouble()
    few.most_words = 2
    tapes = Tapes(few)
    module = Step()
    graph = capture(module, inputs_of(5), tapes=tapes)
    assert tapes.made == 0 and "arguments" in next(iter(tapes.refused))
    assert_like_eager(module, graph, inputs_of(5))


def test_a_wrapper_that_reads_sizes_from_tensors_has_no_tape(tapes, monkeypatch):
    import re

    monkeypatch.setattr(recorder_module, "_READS_SIZES", re.compile("def call"))
    capture(Step(), inputs_of(5), tapes=tapes)
    assert [*tapes.refused] == ["its sizes are not among its inputs"]


def test_a_kernel_that_is_bound_in_another_way_has_no_tape(tapes, monkeypatch):
    monkeypatch.setattr(recorder_module, "_KERNEL", "no such symbol")
    capture(Step(), inputs_of(5), tapes=tapes)
    assert [*tapes.refused] == ["its kernels are not bound as they are known to be"]
