"""Replayed graphs against eager, with a replayer in Python."""

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
from graphs.torch_internals.replay.replay import Replays
from tests.graphs.torch_internals.replay.steps import Step, assert_like_eager, inputs_of

pytestmark = pytest.mark.usefixtures("no_grad")


def test_a_replayed_graph_is_that_of_eager_wherever_its_inputs_lie(replays, replayer):
    module = Step()
    graph = capture(module, inputs_of(5), replays=replays)
    assert (replays.recorded, replays.refused, replayer.replayed) == (1, {}, [])
    inputs = [inputs_of(5) for _ in range(4)]
    for run, each in enumerate(inputs):
        assert_like_eager(module, graph, each)
        assert len(replayer.replayed) == run + 1
    assert replayer.replayed[0] > 3


def test_what_is_returned_is_not_overwritten_by_the_next_run(replays):
    module = Step()
    graph = capture(module, inputs_of(5), replays=replays)
    first, _ = graph.run(*inputs_of(5))
    before = first.clone()
    second, _ = graph.run(*inputs_of(5))
    assert torch.equal(first, before) and not torch.equal(first, second)


def test_parameters_and_buffers_may_be_replaced_and_moved(replays, replayer):
    module = Step()
    graph = capture(module, inputs_of(5), replays=replays)
    module.scale.data = torch.randn(48)
    assert_like_eager(module, graph, inputs_of(5))
    module.cache = torch.zeros(8, 48)
    assert_like_eager(module, graph, inputs_of(5))
    assert len(replayer.replayed) == 2


@pytest.mark.parametrize("is_stored", [False, True])
def test_each_bucket_of_one_compile_has_a_replay(replays, replayer, tmp_path, is_stored):
    module, space = Step(), explicit(("tokens",), [(2,), (5,), (8,)])
    starts = 2 if is_stored else 1
    for start in range(starts):
        replays = Replays(replayer)
        backend = StoredInductor(ArtifactStore(tmp_path / "store")) if is_stored else "inductor"
        manager = WarmupManager(
            module, space, lambda bucket: inputs_of(bucket.tokens), backend=backend,
            symbolic=("tokens",), replays=replays,
        )  # fmt: skip
        report = manager.warmup()
        assert report.compiles == (1 if start == 0 else 0)
        assert (replays.recorded, replays.refused) == (3, {})
        replayer.replayed.clear()
        for tokens in (5, 2, 8, 5):
            assert_like_eager(module, Bucketed(manager, tokens), inputs_of(tokens))
        assert len(replayer.replayed) == 4


class Bucketed:
    def __init__(self, manager, tokens):
        self.run = lambda *inputs: manager.run(manager.bucket(tokens=tokens), *inputs)


def test_replays_are_counted_and_compile_nothing(replays):
    graph = capture(Step(), inputs_of(5), replays=replays)
    with no_compile(strict=True) as watch:
        for _ in range(3):
            graph.run(*inputs_of(5))
    assert (watch.replays, watch.compiles) == (3, 0)


def test_a_failing_call_raises_and_nothing_is_done_twice(replays, replayer):
    module = Step()
    graph = capture(module, inputs_of(5), replays=replays)
    before = module.cache.clone()
    replayer.fails = True
    with pytest.raises(RuntimeError, match="a call failed"):
        graph.run(*inputs_of(5))
    assert torch.equal(module.cache, before)
    replayer.fails = False
    assert_like_eager(module, graph, inputs_of(5))
    assert len(replayer.replayed) == 1


def test_threads_replay_concurrently_each_in_its_own_arena(replays, replayer):
    module = Step()
    graph = capture(module, inputs_of(8), replays=replays)
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
    assert not wrong and len(replayer.replayed) == 200
    assert 1 <= len(replays._arenas) <= 4


def test_disabled_replays_leave_graphs_as_inductor_wrote_them(replays, replayer):
    module = Step()
    graph = capture(module, inputs_of(5), replays=replays)
    replays.enabled = False
    assert_like_eager(module, graph, inputs_of(5))
    assert not replayer.replayed
    replays.enabled = True
    assert_like_eager(module, graph, inputs_of(5))
    assert len(replayer.replayed) == 1


def test_another_default_device_is_not_that_of_replays(replays, replayer):
    module = Step()
    inputs = inputs_of(5)
    with torch.device("meta"):
        graph = capture(module, inputs, replays=replays)
        made = graph.run(*inputs)
    assert len(replayer.replayed) == 1
    torch.testing.assert_close(made, module(*inputs))


def test_sizes_whose_first_run_failed_are_recorded_by_the_next(replays, replayer):
    module, space = Step(), explicit(("tokens",), [(2,), (5,), (8,)])
    fails = [True]

    def make_inputs(bucket):
        tokens, rows = inputs_of(bucket.tokens)
        return tokens, rows + 100 * (bucket.tokens == 5 and fails[0])  # out of range

    manager = WarmupManager(module, space, make_inputs, symbolic=("tokens",), replays=replays)
    assert len(manager.warmup().failed) == 1
    fails[0] = False
    assert not manager.warmup().failed
    assert (replays.recorded, replays.refused) == (3, {})


def test_the_memory_of_replays_is_kept_by_graphs_that_are_not_closed(replayer):
    replays, module = Replays(replayer), Step()
    replayer.replayed.clear()
    gone = weakref.ref(replays)
    graph = capture(module, inputs_of(5), replays=replays)
    del replays
    gc.collect()
    assert_like_eager(module, graph, inputs_of(5))
    assert len(replayer.replayed) == 1
    graph.close()
    gc.collect()
    assert gone() is None


def test_what_is_captured_without_replays_has_none(replays, replayer):
    capture(Step(), inputs_of(5), replays=replays)
    module = Step()
    graph = capture(module, inputs_of(5))
    assert_like_eager(module, graph, inputs_of(5))
    assert not replayer.replayed


def test_modules_of_inductor_without_a_call_are_loaded_as_they_are(replays):
    from torch._inductor.codecache import PyCodeCache

    module = replays.record(lambda: PyCodeCache.load("answer = 42\n"))
    assert module.answer == 42 and not hasattr(module, "call")


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x):
        return x + self.count.add_(1)


def test_a_callable_runs_as_often_as_it_was_asked_to(replays, replayer):
    module = Counter()
    graph = capture(module, [torch.zeros(4)], replays=replays)
    assert module.count.item() == 1 and replays.recorded == 1
    assert graph.run(torch.ones(4)).tolist() == [3.0] * 4
    assert replayer.replayed == [1]


def test_what_does_not_repeat_itself_is_not_replayed_where_it_should(replayer):
    replays = Replays(replayer, verify=True)
    capture(Counter(), [torch.zeros(4)], replays=replays)
    assert (replays.recorded, [*replays.refused]) == (0, ["its replay returns something else"])


def test_what_repeats_itself_is_compared_before_it_serves(replayer):
    replays, module = Replays(replayer, verify=True), Step()
    replayer.replayed.clear()
    graph = capture(module, inputs_of(5), replays=replays)
    assert (replays.recorded, len(replayer.replayed)) == (1, 1)
    assert_like_eager(module, graph, inputs_of(5))


def test_wrong_replayers_and_replays_are_refused_in_one_line(replayer):
    with pytest.raises(TypeError, match="expected a Replayer, got NoneType: take"):
        Replays(None)
    with pytest.raises(TypeError, match="expected a Replayer, got SimpleNamespace: take"):
        Replays(
            SimpleNamespace(recording=replayer.recording, replay=replayer.replay)
        )  # of an older contract
    with pytest.raises(TypeError, match="expected Replays or None, got ReplayerDouble: make"):
        capture(torch.relu, [torch.zeros(2)], replays=replayer)
