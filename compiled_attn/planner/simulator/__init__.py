"""Simulates the steps of an engine for a list of requests, without a model.

The engine's own scheduler plans each step, on a pool that counts blocks and finds prefixes of whole
blocks. `StepTime` defines the duration of a step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from compiled_attn.cache.blocks.window import most_held
from compiled_attn.planner import Demand
from compiled_attn.planner.simulator.engine import SimulatedEngine, StepTime, sequences
from compiled_attn.planner.simulator.simulated_steps import SimulatedSteps
from compiled_attn.workloads.arrival import Arrival

__all__ = ["SimulatedEngine", "Simulation", "StepTime", "simulate"]


@dataclass(frozen=True, slots=True)
class Simulation:
    """The result of a simulation.

    Args:
        needs: needs of all steps in order, by kind of step: ``"engine"``, over the axes tokens,
            shared, unique, logits of the portable kernel, and ``"table"``, over tokens, requests of
            the native one. A kind without steps is left out.
        seconds: of all steps, without idle time.
        preemptions: number of preemptions.
    """

    needs: dict[str, Demand]
    seconds: float
    preemptions: int


def simulate(
    arrivals: Sequence[Arrival],
    engine: SimulatedEngine,
    *,
    speed: float | None = 1.0,
    concurrency: int | None = None,
    steps: type[SimulatedSteps] = SimulatedSteps,
) -> Simulation:
    """Serve ``arrivals`` without computing anything.

    Args:
        arrivals: requests in order of arrival.
        engine: sizes and speed.
        speed: factor by which requests arrive faster than given; None: all at once.
        concurrency: requests in flight at most; None: no limit.
        steps: how steps are scheduled and recorded.

    Raises:
        ValueError: no arrivals, a request that the pool can never hold, a bad speed or concurrency.
    """
    if not arrivals:
        raise ValueError("expected at least one arrival, got none: give a trace with requests")
    if speed is not None and not 0 < speed < float("inf"):
        raise ValueError(f"expected speed above 0 or None, got {speed}: 1 uses the given times")
    if concurrency is not None and concurrency < 1:
        raise ValueError(f"expected concurrency >= 1 or None, got {concurrency}: raise it")
    for arrival in arrivals:
        _check_fits(arrival, engine)
    run = steps(engine)
    times = [0.0 if speed is None else a.arrival_s / speed for a in arrivals]
    queue = deque(zip(times, sequences(arrivals, engine.block_size), strict=True))
    run.serve(queue, concurrency or len(queue))
    needs = {
        name: Demand(axes, np.array(run.needs[name], np.int64))
        for name, axes in run.axes.items()
        if run.needs[name]
    }
    return Simulation(needs, run.seconds, run.scheduler.preemptions)


def _check_fits(arrival: Arrival, engine: SimulatedEngine) -> None:
    longest = arrival.prompt_tokens + arrival.output_tokens - 1  # the last token is never computed
    size = engine.block_size
    if most_held(longest, engine.window, engine.max_tokens, size) > engine.blocks:
        raise ValueError(
            f"expected a pool that holds a request of {longest + 1} tokens, got {engine.blocks} "
            f"blocks of {size}: raise blocks, or scale the lengths"
        )
