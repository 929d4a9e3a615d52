"""Cases: how long outputs, graphs and their memory last, and how many there may be."""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from graphs.backends.conformance.case import Refused, Subject, case, expect, expect_same
from graphs.buckets.ladders import explicit
from graphs.capture.memory import bytes_in_use
from graphs.errors import CaptureError
from graphs.warmup.manager import WarmupManager

_MANY = 12  # graphs of one callable: more than Dynamo's limit of recompiles
_RUNS = 40
_ELEMENTS = 1 << 18  # of an output, so that each run that leaks takes a megabyte
_SLACK = 12 << 20


def _product(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight


@case("outputs stay as they are when graphs run again, or the backend says `outputs_last = False`")
def outputs_last(subject: Subject) -> None:
    """If not, they stay until the next run of the callable, and with `fresh_outputs` for good."""

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        return y, (y + 1)[1:]

    def other(x: Tensor) -> Tensor:
        return x * 0 + 9

    x = subject.rand(4)
    noise = subject.capture(other, x)
    if subject.backend.outputs_last:
        graph = subject.capture(function, x)
    else:
        graph = subject.capture(function, x)
        got = graph.run(x)
        noise.run(x)
        filled = [torch.full((4,), 5.0, device=subject.device) for _ in range(8)]
        expect_same(got, function(x), "before the callable ran again")
        del filled
        if not subject.has_option("fresh_outputs"):
            return
        graph = subject.capture(function, x, fresh_outputs=True)
    inputs = [subject.rand(4) for _ in range(6)]
    outputs = []
    for each in inputs:
        outputs.append(graph.run(each))
        noise.run(each)
    for run, (each, got) in enumerate(zip(inputs, outputs, strict=True), start=1):
        expect_same(got, function(each), f"of run {run} after all {len(inputs)}")


@case("memory does not grow with runs, and neither inputs nor outputs are held")
def memory_of_runs(subject: Subject) -> None:
    """Each run takes a megabyte in and out."""

    def function(x: Tensor) -> Tensor:
        return x + 1

    x = torch.zeros(_ELEMENTS, device=subject.device)
    graph = subject.capture(function, x)
    held: list[weakref.ref[Tensor]] = []

    def runs(count: int) -> None:
        for _ in range(count):
            x = torch.zeros(_ELEMENTS, device=subject.device)
            held.extend((weakref.ref(x), weakref.ref(graph.run(x))))

    runs(4)
    gc.collect()
    _return_freed_memory()
    before = _bytes(subject)
    runs(_RUNS)
    gc.collect()
    grown = _bytes(subject) - before
    expect(grown < _SLACK, f"{_RUNS} runs took {grown / 2**20:.0f} MiB of memory")
    alive = {id(tensor) for each in held if (tensor := each()) is not None}
    expect(len(alive) <= 4, f"{len(alive)} inputs and outputs of {_RUNS} runs are held")


@case("close() frees what the graph holds, and a closed graph does not run")
def memory_of_closed(subject: Subject) -> None:
    """Nothing holds the module afterwards, and captures can be repeated."""

    def once() -> weakref.ref[nn.Module]:
        module, x = nn.Linear(4, 4).to(subject.device), subject.rand(2, 4)
        graph = subject.capture(module, x)
        expect_same(graph.run(x), module(x))
        graph.close()
        graph.close()
        expect(not graph.static_inputs, "a closed graph has static inputs")
        try:
            graph.run(x)
        except CaptureError:
            return weakref.ref(module)
        raise AssertionError("a closed graph ran")

    dead = [once(), once()]
    gc.collect()
    alive = sum(each() is not None for each in dead)
    expect(not alive, f"{alive} of 2 modules are held after their graphs were closed")


@case("many graphs of one callable can be alive at the same time, each with its own size")
def many_graphs(subject: Subject) -> None:
    """More than Dynamo's limit of recompiles; run in turn."""
    weight = subject.rand(4, 4)
    sizes = range(2, 2 + _MANY)
    graphs = {size: subject.capture(_product, subject.rand(size, 4), weight) for size in sizes}
    for size in [*sizes, *reversed(sizes)]:
        x = subject.rand(size, 4)
        expect_same(graphs[size].run(x, weight), _product(x, weight), f"with {size} rows")


@case("graphs of several callables run in turn without touching each other")
def several_callables(subject: Subject) -> None:
    """With and without state."""

    class Sum(nn.Module):
        total: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(3, device=subject.device))

        def forward(self, x: Tensor) -> Tensor:
            self.total.add_(x)
            return self.total + 0

    def double(x: Tensor) -> Tensor:
        return x * 2

    one, two = Sum(), Sum()
    pairs: list[tuple[Callable[..., Any], Callable[..., Any]]] = []
    for module in (one, two):
        graph = subject.capture(module, subject.rand(3))
        module.total.zero_()
        pairs.append((graph.run, Sum().forward))
    pairs.append((subject.capture(double, subject.rand(3)).run, double))
    for step in range(9):
        run, eager = pairs[step % 3]
        x = subject.rand(3)
        expect_same(run(x), eager(x), f"in step {step + 1}")


@case("a graph runs in other threads than the one that captured it")
def threads(subject: Subject) -> None:
    """One after the other."""
    weight, x = subject.rand(4, 4), subject.rand(3, 4)
    graph = subject.capture(_product, x, weight)
    results: list[Any] = []

    def run() -> None:
        with torch.no_grad():
            try:
                results.append(graph.run(x, weight).clone())
            except Exception as error:
                results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(results[0], Exception):
        raise AssertionError("it failed in another thread") from results[0]
    expect_same(results[0], _product(x, weight))


@case("symbolic sizes, where it has them, give every bucket the right result")
def symbolic_sizes(subject: Subject) -> None:
    """One axis of four buckets."""
    if reason := subject.backend.why_no_symbolic():
        raise Refused(reason)
    weight = subject.rand(4, 4)
    manager = WarmupManager(
        _product,
        explicit(["rows"], [1, 2, 5, 8]),
        lambda bucket: [subject.rand(bucket["rows"], 4), weight],
        backend=subject.backend,
        symbolic=("rows",),
    )
    manager.warmup()
    for rows in (8, 1, 5, 2):
        x = subject.rand(rows, 4)
        expect_same(manager({"rows": rows}, x, weight), x @ weight, f"with {rows} rows")


def _return_freed_memory() -> None:
    """Returns what the C library keeps of freed memory, in which a leak would be invisible."""
    with suppress(AttributeError, OSError):  # of other libraries than glibc
        ctypes.CDLL(None).malloc_trim(0)


def _bytes(subject: Subject) -> int:
    if subject.device.type != "cpu":
        torch.accelerator.synchronize(subject.device)
        module = torch.get_device_module(subject.device)
        if (allocated := getattr(module, "memory_allocated", None)) is not None:
            return int(allocated(subject.device))
    return bytes_in_use({subject.device})
