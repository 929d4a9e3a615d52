"""Prints the overhead from a need to the running graph: `python benchmarks/dispatch.py`.

The bare graph is inductor's code, called with its flat inputs and without any checks. All ways are
timed alternately, so that a busy machine slows them equally.
"""

from __future__ import annotations

import statistics
import timeit
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from graphs import Bucket, WarmupManager, linear
from graphs.capture.input_overlaps import InputOverlaps
from graphs.capture.module_state import ModuleState

_GOAL_US, _CHECK_GOAL_US = 5.0, 2.0
_LAYERS, _INPUTS = 30, 12
_BUCKETS = 32
_WIDTH = 8


class Step(nn.Module):
    """A little work on a cache, a slot list and a token batch."""

    cache: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(_BUCKETS, _WIDTH))
        self.scale = 2.0

    def forward(self, x: Tensor, slots: Tensor) -> Tensor:
        """Write the rows into their slots, and return a multiple of them."""
        self.cache[slots] = x
        return torch.relu(x) * self.scale


def inputs_of(bucket: Bucket) -> list[Tensor]:
    """Rows and the slots that they go to."""
    return [torch.ones(bucket.tokens, _WIDTH), torch.arange(bucket.tokens)]


def microseconds(ways: dict[str, Callable[[], object]], rounds: int = 60) -> dict[str, float]:
    """Median time of one call of each way, timed alternately."""
    number = 500
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            times[name].append(timeit.timeit(way, number=number) / number * 1e6)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    """Print the time of each way, and what it adds to the bare graph."""
    module, space = Step(), linear(tokens=(1, 1, _BUCKETS))
    manager = WarmupManager(module, space, inputs_of)
    with torch.no_grad():
        manager.warmup()
        print(manager.report)
        x, slots = inputs_of(Bucket(tokens=24))
        graph = manager._graphs[Bucket(tokens=24)]
        bare = _bare(module, x, slots)
        shared = _compiled_at_all_shapes(module)
        need = {"tokens": 24}
        ways: dict[str, Callable[[], object]] = {
            "bare graph": bare,
            "captured graph: check, run": lambda: graph.run(x, slots),
            "manager: pick, check, run": lambda: manager(need, x, slots),
            f"torch.compile, {_BUCKETS} shapes": lambda: shared(x, slots),
            "eager": lambda: module(x, slots),
        }
        result = microseconds(ways)
    base = result["bare graph"]
    for name, value in result.items():
        print(f"{name:30s} {value:7.2f} us  {value - base:+7.2f} us over the bare graph")
    over = result["manager: pick, check, run"] - base
    state = "reached" if over < _GOAL_US else "missed"
    print(f"goal: under {_GOAL_US:g} us over the bare graph: {state}")
    for name, value in microseconds(_checks()).items():
        state = "reached" if value < _CHECK_GOAL_US else "missed"
        print(f"{name:50s} {value:5.2f} us, goal under {_CHECK_GOAL_US:g} us: {state}")


def _checks() -> dict[str, Callable[[], object]]:
    """Checks of each run that Dynamo's guards do not make."""
    model = nn.Sequential(*(_layer() for _ in range(_LAYERS)))
    modules = sum(1 for _ in model.modules())
    staging = torch.zeros(_INPUTS, _WIDTH)
    overlaps = InputOverlaps(lambda *inputs: None, [*staging], None)
    inputs = tuple(staging)
    return {
        f"unchanged model: {_LAYERS} layers, {modules} modules": ModuleState(model).changed,
        f"overlaps of {_INPUTS} inputs": lambda: overlaps.hold(inputs),
    }


def _layer() -> nn.Module:
    """A layer with as many modules as one of Llama."""
    attention = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(4)))
    mlp = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(3)), nn.SiLU())
    return nn.Sequential(nn.RMSNorm(_WIDTH), attention, nn.RMSNorm(_WIDTH), mlp)


def _bare(module: Step, x: Tensor, slots: Tensor) -> Callable[[], object]:
    # Dynamo's code calls the graph with its flat inputs, buffers included.
    calls: list[tuple[Any, ...]] = []
    graphs: list[Callable[..., Any]] = []

    def remember(graph: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
        from torch._inductor.compile_fx import compile_fx

        compiled: Any = compile_fx(graph, inputs)
        graphs.append(compiled)

        def run(*flat: Any) -> Any:
            calls.append(flat)
            return compiled(*flat)

        return run

    torch.compile(lambda *given: module(*given), backend=remember, fullgraph=True)(x, slots)
    (graph,), (flat,) = graphs, calls
    return lambda: graph(*flat)


def _compiled_at_all_shapes(module: Step) -> Callable[..., Any]:
    with torch._dynamo.config.patch(recompile_limit=_BUCKETS, accumulated_recompile_limit=256):
        shared: Callable[..., Any] = torch.compile(module, fullgraph=True, dynamic=False)
        for tokens in range(1, _BUCKETS + 1):
            shared(*inputs_of(Bucket(tokens=tokens)))
    return shared


if __name__ == "__main__":
    main()
