import subprocess
import sys
import threading

import pytest
import torch

from graphs import CompileWatch
from graphs.watch.causes import CompileEvent


def compiled(function):
    return torch.compile(function, backend="eager", dynamic=False)


def test_first_compiles_and_recompiles_are_distinguished_with_the_guard():
    def scaled(x):
        return x * 2

    function = compiled(scaled)
    with CompileWatch() as watch:
        function(torch.ones(3))
        function(torch.ones(3))
        function(torch.ones(4))
    assert [event.kind for event in watch.events] == ["compile", "recompile"]
    assert watch.compiles == 2
    assert watch.events[0].function == "scaled"
    assert watch.events[0].file == __file__
    assert "expected 3, actual 4" in watch.events[1].reason
    assert watch.events[1].thread == threading.get_ident()


def test_graph_breaks_are_counted():
    def broken(x):
        x = x + 1
        torch._dynamo.graph_break()
        x = x * 2
        torch._dynamo.graph_break()
        return x

    with CompileWatch() as watch:
        compiled(broken)(torch.ones(2))
    assert watch.graph_breaks == 2
    assert watch.compiles == 3


def test_a_function_that_has_used_up_its_recompiles_is_seen():
    function = compiled(lambda x: x - 1)
    with torch._dynamo.config.patch(recompile_limit=2), CompileWatch() as watch:
        for size in range(1, 4):
            function(torch.ones(size))
    assert [event.kind for event in watch.events] == ["compile", "recompile", "refused recompile"]
    assert watch.compiles == 2
    assert "expected 2, actual 3" in watch.events[2].reason


@pytest.mark.parametrize(
    ("trigger", "kind"), [("CUDAGRAPH_RECORDING", "recording"), ("TRITON_AUTOTUNING", "build")]
)
def test_recordings_and_builds_at_run_time_are_distinguished(trigger, kind):
    callback = torch._dynamo.callback
    with CompileWatch() as watch:
        with callback.callback_handler.install_callbacks(callback.CallbackTrigger[trigger], "0/0"):
            pass
        assert watch.compiles == 0
    (event,) = watch.events
    assert event.kind == kind and event.remedy


def test_graphs_are_counted_apart_from_compiles():
    def split(x):
        torch._dynamo.graph_break()
        return x + 1

    with CompileWatch() as watch:
        compiled(split)(torch.ones(2))
    assert (watch.compiles, watch.graphs) == (2, 1)


def test_a_build_inside_of_a_compile_is_part_of_it():
    def building(graph, inputs):
        subprocess.run(["cc", "nothing.c"], capture_output=True)
        return graph.forward

    with CompileWatch() as watch:
        torch.compile(lambda x: x + 7, backend=building)(torch.ones(2))
        subprocess.run(["cc", "nothing.c"], capture_output=True)
    assert [event.kind for event in watch.events] == ["compile", "build"]


def test_what_on_event_raises_reaches_the_caller_before_anything_is_compiled():
    graphs = []

    def compiler(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def refuse(event):
        raise torch._dynamo.exc.TorchRuntimeError(f"no {event.kind}")

    function = torch.compile(lambda x: x + 3, backend=compiler)
    with CompileWatch(refuse), pytest.raises(RuntimeError, match="no compile"):
        function(torch.ones(1))
    assert graphs == []
    assert function(torch.ones(1)).item() == 4


def test_builds_are_counted_until_the_end():
    with CompileWatch() as watch:
        subprocess.run(["cc", "--version"], capture_output=True)
        subprocess.run([sys.executable, "-c", ""])
        subprocess.run(["cc", "nothing.c"], capture_output=True)
    subprocess.run(["cc", "nothing.c"], capture_output=True)
    assert [(event.kind, event.function) for event in watch.events] == [("build", "nothing.c")]


def test_an_event_reads_as_one_line():
    event = CompileEvent("recompile", "decode", "model.py", 7, "tensor 'x' size mismatch", 0)
    assert str(event) == "recompile of decode (model.py:7): tensor 'x' size mismatch"
    assert str(CompileEvent("capture", "decode", "", 0, "", 0)) == "capture of decode"
