"""The demand for planning without a trace: a mixture of synthetic workloads.

They are chat, code and retrieval (`compiled_attn.workloads.synthetic`), with and without common
prefixes, in their own lengths and stretched to the context, at half load, at full load and all at
once. A broad demand over all legal needs is added, because traffic differs between users.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from compiled_attn.planner import Demand
from compiled_attn.planner.region import Region
from compiled_attn.planner.simulator import SimulatedEngine, Simulation, simulate
from compiled_attn.planner.simulator.kinds import StepKind, within
from compiled_attn.workloads.arrival import Arrival, fit, scaled
from compiled_attn.workloads.synthetic import KINDS, synthetic

__all__ = ["broad_demand", "default_demand", "full_speed"]

_REQUESTS = 400
_LOADS = (0.5, 1.0)
_FOLLOW_UPS = 0.8
_STEPS = 5000  # of each workload, evenly spaced
_WORTH_STRETCHING = 1.5
_BROAD_SHARE, _BROAD_NEEDS, _FULL = 0.3, 4000, 0.1


def default_demand(
    kind: StepKind,
    engine: SimulatedEngine,
    context: int,
    *,
    workloads: Sequence[str] = KINDS,
    seed: int = 0,
) -> Demand:
    """Return the mixture, in which all workloads have the same total cost.

    Raises:
        ValueError: no workloads, or see `synthetic` and `simulate`.
    """
    longest = min(context, engine.blocks * engine.block_size)
    parts: list[Demand] = []
    for arrivals in _arrivals(workloads, longest, seed):
        at_once = simulate(arrivals, engine, speed=None, steps=kind.steps)
        fastest = full_speed(arrivals, at_once)
        loaded = (
            simulate(arrivals, engine, speed=load * fastest, steps=kind.steps) for load in _LOADS
        )
        for needs in (found.needs for found in (*loaded, at_once)):
            if kind.name in needs:
                found = within(needs[kind.name], kind.axes)[0]
                parts.append(found[:: 1 + len(found) // _STEPS])
    if not parts:
        raise ValueError(
            f"expected workloads of {', '.join(KINDS)}, got {list(workloads)}: name one"
        )
    shares = [(1 - _BROAD_SHARE) / len(parts)] * len(parts) + [_BROAD_SHARE]
    parts.append(broad_demand(kind, seed))
    means = [float(kind.cost.of(d.names, d.points) @ d.weights) / d.total for d in parts]
    return Demand.mixture(parts, [s / mean for s, mean in zip(shares, means, strict=True)])


def broad_demand(kind: StepKind, seed: int = 0) -> Demand:
    """Return legal needs of every order of magnitude, each with the same total cost.

    Sizes are log-uniform and independent; every tenth is at its limit, as in a full step.
    """
    rng = np.random.default_rng(seed)
    region, count = Region(kind.axes, kind.legal), 20 * _BROAD_NEEDS
    columns = []
    for axis in kind.axes:
        logs = rng.uniform(np.log(axis.low + 1), np.log(axis.high + 2), count)
        sizes = np.clip(np.floor(np.exp(logs)).astype(np.int64) - 1, axis.low, axis.high)
        columns.append(np.where(rng.random(count) < _FULL, axis.high, sizes))
    points = np.stack([*columns], axis=1)
    points = np.concatenate([points[region.allows(points)][:_BROAD_NEEDS], region.top[None]])
    own = kind.cost.of(kind.names, points)
    return Demand(kind.names, points, 1 / np.maximum(own, own[own > 0].min()))


def full_speed(arrivals: Sequence[Arrival], at_once: Simulation) -> float:
    """Return the factor of speed at which requests arrive as fast as they are served.

    ``at_once`` is the simulation in which all arrive at once.
    """
    duration = arrivals[-1].arrival_s - arrivals[0].arrival_s
    return duration / at_once.seconds or 1.0


def _arrivals(workloads: Sequence[str], longest: int, seed: int) -> Iterator[list[Arrival]]:
    for workload in workloads:
        for follow_ups in (None, _FOLLOW_UPS):
            arrivals = fit(synthetic(workload, _REQUESTS, seed, follow_ups=follow_ups), longest)
            yield arrivals
            stretch = longest / max(a.prompt_tokens + a.output_tokens + 2 for a in arrivals)
            if stretch >= _WORTH_STRETCHING:
                yield scaled(arrivals, stretch**0.5)
                yield scaled(arrivals, stretch)
