"""Taped graphs against eager, through a player in Python."""

from __future__ import annotations

import gc
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from graphs import WarmupManager, capture, explicit, no_compile
from graphs.store import ArtifactStore, StoredInductor
from graphs.torch_internals.replay.replay import Tapes
from tests.graphs.torch_internals.replay.steps import Step, assert_like_eager, inputs_of

pytestmark = pytest.mark.usefixtures("no_grad")


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


def test_a_call_that_fails_is_told_and_nothing_is_done_twice(tapes, player):
    module = Step()
    graph = capture(module, inputs_of(5), tapes=tapes)
    before = module.cache.clone()
    player.fails = True
    with pytest.raises(RuntimeError, match="a call failed"):
        graph.run(*inputs_of(5))
    assert torch.equal(module.cache, before)
    player.fails = False
    assert_like_eager(module, graph, inputs_of(5))
    assert len(player.played) == 1


def test_threads_play_at_once_each_in_an_arena_of_its_own(tapes, player):
    module = Step()
    graph = capture(module, inputs_of(8), tapes=tapes)
    given = [(torch.randn(8, 48), torch.arange(8)) for _ in range(4)]
    expected = [module(*each)[0] for each in given]
    wrong = []

    def run(inputs, right):
        with torch.no_grad():
            for _ in range(50):
                made, _ = graph.run(*inputs)
                if not torch.allclose(made, right, atol=1e-5):
                    wrong.append(made)

    threads = [
        threading.Thread(target=run, args=each) for each in zip(given, expected, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len(player.played) == 200
    assert 1 <= len(tapes._arenas) <= 4


def test_graphs_run_as_inductor_wrote_them_where_tapes_are_not_to_be_played(tapes, player):
    module = Step()
    graph = capture(module, inputs_of(5), tapes=tapes)
    tapes.are_played = False
    assert_like_eager(module, graph, inputs_of(5))
    assert not player.played
    tapes.are_played = True
    assert_like_eager(module, graph, inputs_of(5))
    assert len(player.played) == 1


def test_another_default_device_is_not_that_of_tapes(tapes, player):
    module = Step()
    inputs = inputs_of(5)
    with torch.device("meta"):
        graph = capture(module, inputs, tapes=tapes)
        made = graph.run(*inputs)
    assert len(player.played) == 1
    torch.testing.assert_close(made, module(*inputs))


def test_sizes_whose_first_run_failed_are_taped_by_the_next(tapes, player):
    module, space = Step(), explicit(("tokens",), [(2,), (5,), (8,)])
    fails = [True]

    def make_inputs(bucket):
        tokens, rows = inputs_of(bucket.tokens)
        return tokens, rows + 100 * (bucket.tokens == 5 and fails[0])  # out of range

    manager = WarmupManager(module, space, make_inputs, symbolic=("tokens",), tapes=tapes)
    assert len(manager.warmup().failed) == 1
    fails[0] = False
    assert not manager.warmup().failed
    assert (tapes.made, tapes.refused) == (3, {})


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


def test_what_is_captured_without_tapes_has_none(tapes, player):
    capture(Step(), inputs_of(5), tapes=tapes)
    module = Step()
    graph = capture(module, inputs_of(5))
    assert_like_eager(module, graph, inputs_of(5))
    assert not player.played


def test_modules_of_inductor_without_a_call_are_loaded_as_they_are(tapes):
    from torch._inductor.codecache import PyCodeCache

    module = tapes.taping(lambda: PyCodeCache.load("answer = 42\n"))
    assert module.answer == 42 and not hasattr(module, "call")


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
    assert (tapes.made, [*tapes.refused]) == (0, ["played again, it returns something else"])


def test_what_repeats_itself_is_compared_before_it_serves(player):
    tapes, module = Tapes(player, repeats=True), Step()
    player.played.clear()
    graph = capture(module, inputs_of(5), tapes=tapes)
    assert (tapes.made, len(player.played)) == (1, 1)
    assert_like_eager(module, graph, inputs_of(5))


def test_what_is_no_player_and_what_are_no_tapes_is_refused_in_one_line(player):
    with pytest.raises(TypeError, match="expected a player, got NoneType: take"):
        Tapes(None)
    with pytest.raises(TypeError, match="expected a player, got SimpleNamespace: take"):
        Tapes(SimpleNamespace(noting=player.noting, play=player.play))  # of an older contract
    with pytest.raises(TypeError, match="expected Tapes or None, got PlayerDouble: make"):
        capture(torch.relu, [torch.zeros(2)], tapes=player)
