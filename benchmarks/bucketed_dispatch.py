"""Prints what a call of `graphs.bucketed` adds to its graph.

    python benchmarks/bucketed_dispatch.py

Eight keyword tensors, a module that computes next to nothing, one thread. The bare graph is
`CapturedGraph.run` with flat inputs, its checks included. Calls have the sizes of a bucket, other
sizes that a graph of symbolic sizes takes as they are, or sizes that are padded: eight copies, of
which the time is printed too. All ways are timed alternately, by the time of the processor;
differences are medians over the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
import timeit
from collections.abc import Callable

import torch
from torch import Tensor, nn

import graphs
from graphs.report.surroundings import machine
from graphs.torch_internals.foreach import copy_all

_GOAL_US = 6.0
_NAMES = ("ids", "mask", "types", "positions", "left", "right", "scale", "shift")


class Sum(nn.Module):
    """Adds eight tensors of a batch."""

    def forward(
        self,
        ids: Tensor,
        mask: Tensor,
        types: Tensor,
        positions: Tensor,
        left: Tensor,
        right: Tensor,
        scale: Tensor,
        shift: Tensor,
    ) -> dict[str, Tensor]:
        """``[batch, length]`` each; returns their sum."""
        return {"sum": ids + mask + types + positions + left + right + scale + shift}


def inputs_of(batch: int, length: int) -> dict[str, Tensor]:
    """Eight tensors."""
    return {name: torch.ones(batch, length) for name in _NAMES}


def main() -> None:
    """Print the time of each way, and what it adds to the bare graph."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--rounds", type=int, default=400)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with torch.no_grad():
        run(options.backend, options.rounds)


def run(backend: str, rounds: int) -> None:
    """Print the table."""
    ranges = {"batch": [2, 8], "length": [4, 16]}
    wrapped = {
        symbolic: graphs.bucketed(
            Sum(), inputs_of(3, 5), backend=backend, symbolic=symbolic, **ranges
        )
        for symbolic in ((), None)
    }
    for each in wrapped.values():
        each.warmup()
    fixed, symbolic = wrapped.values()
    whole, part = inputs_of(8, 16), inputs_of(7, 15)
    print(
        f"# {machine()['cpu']}, torch {torch.__version__}, float32, 1 thread, 8 tensors of 8 x 16"
    )
    over = {}
    for name, call in (("fixed sizes", fixed), ("symbolic sizes", symbolic)):
        graph, flat = call.managers[0].graph(graphs.Bucket(batch=8, length=16)), (*whole.values(),)
        targets, sources = [each[:7, :15] for each in flat], [*part.values()]
        ways: dict[str, Callable[[], object]] = {
            "bare graph": lambda graph=graph, flat=flat: graph.run(*flat),
            "the sizes of a bucket": lambda call=call: call(**whole),
            "other sizes": lambda call=call: call(**part),
            "eight copies alone": lambda to=targets, of=sources: copy_all(to, of),
        }
        with graphs.no_compile():
            times = microseconds(ways, rounds)
        bare = times["bare graph"]
        for way, values in times.items():
            more = statistics.median(one - base for one, base in zip(values, bare, strict=True))
            over[name, way] = more
            print(
                f"{name:15} {way:22} {statistics.median(values):7.2f} us  "
                f"{more:+7.2f} us over the bare graph"
            )
    most = max(value for (_, way), value in over.items() if way == "the sizes of a bucket")
    state = "reached" if most <= _GOAL_US else "missed"
    print(f"goal: at most {_GOAL_US:g} us over the bare graph: {state}")


def microseconds(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Time of the processor of a call of each way, alternately, in each round."""
    number = 50
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            seconds = timeit.timeit(way, number=number, timer=time.process_time)
            times[name].append(seconds / number * 1e6)
    return times


if __name__ == "__main__":
    main()
