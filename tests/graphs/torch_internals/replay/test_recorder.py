"""What can be recorded, and why the rest cannot."""

from __future__ import annotations

import ctypes
import re
import threading

import pytest
import torch

from graphs import capture
from graphs.torch_internals.replay import recorder
from graphs.torch_internals.replay.replay import Replays
from tests.graphs.torch_internals.replay.replayer_double import ReplayerDouble
from tests.graphs.torch_internals.replay.steps import Step, assert_like_eager, inputs_of

pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: torch.relu(x @ x.T) + 1, "aten.mm"),
        (lambda x: torch.sort(x)[0], "records no call"),
        (lambda x: torch.view_as_complex(torch.relu(x).view(4, 2, 2)).conj(), "something else"),
        (lambda x: x + torch.rand(4, 4), "aten.rand"),
    ],
    ids=["a product", "a sort", "a conjugate", "random numbers"],
)
def test_what_cannot_be_recorded_runs_as_it_did_and_says_why(replays, replayer, function, reason):
    x = torch.randn(4, 4)
    graph = capture(function, [x], replays=replays)
    assert replays.recorded == 0 and len(replays.refused) == 1
    assert reason in next(iter(replays.refused))
    y = torch.randn(4, 4)
    made = graph.run(y)
    if "rand" not in reason:
        torch.testing.assert_close(made, function(y))
    assert not replayer.replayed


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
    ids=[
        "a part",
        "several",
        "one memory in parts",
        "nothing",
        "an input",
        "another dtype",
        "bits",
    ],
)
def test_what_is_returned_is_that_of_eager(replays, replayer, function):
    graph = capture(function, [torch.randn(4, 4)], replays=replays)
    assert (replays.recorded, replays.refused) == (1, {})
    for run in range(3):
        x = torch.randn(4, 4)
        torch.testing.assert_close(graph.run(x), function(x))
        assert len(replayer.replayed) == run + 1


def test_a_kernel_with_too_many_arguments_is_not_replayed(replayer):
    few = ReplayerDouble()
    few.max_args = 2
    replays = Replays(few)
    module = Step()
    graph = capture(module, inputs_of(5), replays=replays)
    assert replays.recorded == 0 and "arguments" in next(iter(replays.refused))
    assert_like_eager(module, graph, inputs_of(5))


def test_a_wrapper_that_reads_sizes_from_tensors_is_not_replayed(replays, monkeypatch):
    monkeypatch.setattr(recorder, "_READS_SIZES", re.compile("def call"))
    capture(Step(), inputs_of(5), replays=replays)
    assert [*replays.refused] == ["its sizes are not among its inputs"]


def test_a_kernel_that_is_bound_in_another_way_is_not_replayed(replays, monkeypatch):
    def refuse(*_):
        raise AttributeError

    monkeypatch.setattr(ctypes.CDLL, "__getitem__", refuse)
    capture(Step(), inputs_of(5), replays=replays)
    assert [*replays.refused] == ["its kernels are not bound as they are known to be"]


@pytest.mark.parametrize("at", ["add_kernel", "add_allocation", "finish", "__enter__"])
def test_an_interrupt_at_any_step_of_a_recording_leaves_the_module_as_it_was(
    replays, replayer, monkeypatch, at
):
    module = Step()

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(recorder.Recorder, at, interrupt)
        capture(module, inputs_of(5), replays=replays)
    graph = capture(module, inputs_of(5), replays=replays)
    assert_like_eager(module, graph, inputs_of(5))
    assert (replays.recorded, len(replayer.replayed)) == (1, 1)


def test_an_error_of_the_replayer_costs_the_replay_and_not_the_graph():
    class Broken(ReplayerDouble):
        def call_of(self, op, args, kwargs, made):
            raise ValueError("no such op")

    replays, x = Replays(Broken()), torch.randn(4, 4)
    graph = capture(lambda x: torch.relu(x @ x.T) + 1, [x], replays=replays)
    (why,) = replays.refused
    assert replays.recorded == 0 and why.startswith(
        "the replayer fails at aten.mm.out: ValueError: no such"
    )
    torch.testing.assert_close(graph.run(x), torch.relu(x @ x.T) + 1)


def test_an_error_of_the_recorder_costs_the_replay_and_not_the_graph(
    replays, replayer, monkeypatch
):
    def fail(*_):
        raise ZeroDivisionError("of the recorder")

    module = Step()
    monkeypatch.setattr(recorder.Recorder, "finish", fail)
    graph = capture(module, inputs_of(5), replays=replays)
    assert replays.recorded == 0 and "of the recorder" in next(iter(replays.refused))
    assert_like_eager(module, graph, inputs_of(5))


def test_what_another_thread_runs_of_the_module_is_not_recorded(replays, replayer, monkeypatch):
    module, other, inputs = Step(), [], inputs_of(5)
    first = capture(module, inputs)  # of the same code, which inductor loads once
    note = recorder.Recorder.add_kernel

    def run():
        with torch.no_grad():
            other.append(first.run(*inputs))

    def note_while_another_runs(self, *args):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        return note(self, *args)

    monkeypatch.setattr(recorder.Recorder, "add_kernel", note_while_another_runs)
    graph = capture(module, inputs, replays=replays)
    calls = len(other)
    assert_like_eager(module, graph, inputs_of(5))
    assert calls > 2 and replayer.replayed == [calls]


def test_a_graph_that_calls_nothing_is_not_replayed(replays):
    graph = capture(lambda x: x.view(2, 8), [torch.randn(4, 4)], replays=replays)
    x = torch.randn(4, 4)
    assert torch.equal(graph.run(x), x.view(2, 8))
    assert replays.recorded == 0


def test_what_is_given_on_another_device_cannot_be_recorded(replayer):
    asked = recorder.Recorder([3, torch.empty(2), torch.empty(2, device="meta")], replayer)
    with pytest.raises(recorder.NotReplayable, match="a tensor on meta"):
        asked.finish([])
