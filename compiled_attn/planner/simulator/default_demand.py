"""The demand that default buckets are planned for, without a trace: a mixture of drawn workloads.

Drawn are chat, code and retrieval (`compiled_attn.workloads.synthetic`): as they are and as
conversations whose prompts begin alike, in their own lengths and stretched to the context, at half
load, at full load and offered at once. Beside them stands a broad demand over all legal needs,
because one user's traffic is unlike another's. The same limits give the same buckets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from compiled_attn.planner import Demand
from compiled_attn.planner.region import Region
from compiled_attn.planner.simulator.kinds import Family, within
from compiled_attn.planner.simulator.simulate import SimulatedEngine, Simulation, simulate
from compiled_attn.workloads.arrival import Arrival, fit, scaled
from compiled_attn.workloads.synthetic import KINDS, synthetic

__all__ = ["broad_demand", "default_demand", "full_speed"]

_REQUESTS = 400
_LOADS = (0.5, 1.0)
_FOLLOW_UPS = 0.8
_STEPS = 5000  # of each workload, evenly drawn
_WORTH_STRETCHING = 1.5
_BROAD_SHARE, _BROAD_NEEDS, _FULL = 0.3, 4000, 0.1


def default_demand(
    wanted: Family,
    engine: SimulatedEngine,
    context: int,
    *,
    kinds: Sequence[str] = KINDS,
    seed: int = 0,
) -> Demand:
    """The mixture that default plans are made for; all workloads cost the same together.

    Raises:
        ValueError: no kinds, or what `synthetic` and `simulate` raise.
    """
    longest = min(context, engine.blocks * engine.block_size)
    parts: list[Demand] = []
    for arrivals in _workloads(kinds, longest, seed):
        at_once = simulate(arrivals, engine, speed=None, steps=wanted.steps)
        fastest = full_speed(arrivals, at_once)
        loaded = (
            simulate(arrivals, engine, speed=load * fastest, steps=wanted.steps) for load in _LOADS
        )
        for needs in (found.needs for found in (*loaded, at_once)):
            if wanted.name in needs:
                found = within(needs[wanted.name], wanted.axes)[0]
                parts.append(found[:: 1 + len(found) // _STEPS])
    if not parts:
        raise ValueError(f"expected kinds of {', '.join(KINDS)}, got {list(kinds)}: name one")
    shares = [(1 - _BROAD_SHARE) / len(parts)] * len(parts) + [_BROAD_SHARE]
    parts.append(broad_demand(wanted, seed))
    means = [float(wanted.cost.of(d.names, d.points) @ d.weights) / d.total for d in parts]
    return Demand.mixture(parts, [s / mean for s, mean in zip(shares, means, strict=True)])


def broad_demand(wanted: Family, seed: int = 0) -> Demand:
    """Legal needs of every order of magnitude, each with the same cost in all.

    Sizes are log-uniform and independent; every tenth lies at its limit, as a full step does.
    """
    rng = np.random.default_rng(seed)
    region, count = Region(wanted.axes, wanted.legal), 20 * _BROAD_NEEDS
    columns = []
    for axis in wanted.axes:
        logs = rng.uniform(np.log(axis.low + 1), np.log(axis.high + 2), count)
        sizes = np.clip(np.floor(np.exp(logs)).astype(np.int64) - 1, axis.low, axis.high)
        columns.append(np.where(rng.random(count) < _FULL, axis.high, sizes))
    points = np.stack([*columns], axis=1)
    points = np.concatenate([points[region.allows(points)][:_BROAD_NEEDS], region.top[None]])
    own = wanted.cost.of(wanted.names, points)
    return Demand(wanted.names, points, 1 / np.maximum(own, own[own > 0].min()))


def full_speed(arrivals: Sequence[Arrival], at_once: Simulation) -> float:
    """The multiple of the given speed at which requests arrive just as fast as they are served.

    Args:
        arrivals: the requests.
        at_once: what serving them took when all were offered at once.
    """
    duration = arrivals[-1].arrival_s - arrivals[0].arrival_s
    return duration / at_once.seconds or 1.0


def _workloads(kinds: Sequence[str], longest: int, seed: int) -> Iterator[list[Arrival]]:
    for kind in kinds:
        for follow_ups in (None, _FOLLOW_UPS):
            arrivals = fit(synthetic(kind, _REQUESTS, seed, follow_ups=follow_ups), longest)
            yield arrivals
            stretch = longest / max(a.prompt_tokens + a.output_tokens + 2 for a in arrivals)
            if stretch >= _WORTH_STRETCHING:
                yield scaled(arrivals, stretch**0.5)
                yield scaled(arrivals, stretch)
