"""Buckets for who has no trace: planned for a mixture of drawn workloads, and guarded.

The mixture is chat, code and retrieval (`compiled_attn.demand.synthetic`), each at half load, at
full load and offered at once, scaled to the context; each weighs the same. The same limits give the
same buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from compiled_attn.demand.arrival import Arrival, fit
from compiled_attn.demand.families import Family, family, within
from compiled_attn.demand.simulate import SimulatedEngine, simulate
from compiled_attn.demand.synthetic import KINDS, synthetic
from graphs.planner import CostModel, Demand, PlanReport, plan

__all__ = ["default_demand", "default_plan", "full_speed"]

_REQUESTS = 600
_LOADS = (0.5, 1.0, None)


def default_plan(
    name: str,
    engine: SimulatedEngine,
    context: int,
    max_graphs: int,
    *,
    cost: CostModel | Callable[[Mapping[str, Any]], Any] | None = None,
    kinds: Sequence[str] = KINDS,
    seed: int = 0,
) -> PlanReport:
    """The default buckets of a family of steps within an engine's limits. Takes seconds.

    Args:
        name: one of `compiled_attn.demand.families.FAMILIES`.
        engine: the limits.
        context: longest prompt plus generation, in tokens.
        max_graphs: buckets at most.
        cost: of a bucket; None: that of the simulated device.
        kinds: drawn workloads to mix.
        seed: of the workloads.

    Raises:
        ValueError: what `simulate`, `family` and `graphs.planner.plan` raise.
    """
    wanted = family(name, engine, context)
    demand = default_demand(wanted, engine, context, kinds=kinds, seed=seed)
    return plan(demand, cost or wanted.cost, max_graphs, axes=wanted.axes, legal=wanted.legal)


def default_demand(
    wanted: Family,
    engine: SimulatedEngine,
    context: int,
    *,
    kinds: Sequence[str] = KINDS,
    requests: int = _REQUESTS,
    seed: int = 0,
) -> Demand:
    """The mixture that default plans are made for; every part costs the same.

    Raises:
        ValueError: no kinds, or what `synthetic` and `simulate` raise.
    """
    longest = min(context, engine.blocks * engine.block_size)
    parts: list[Demand] = []
    for kind in kinds:
        arrivals = fit(synthetic(kind, requests, seed), longest)
        fastest = full_speed(arrivals, engine)
        for load in _LOADS:
            speed = None if load is None else load * fastest
            needs = simulate(arrivals, engine, speed=speed).needs
            source = wanted.name if wanted.name in needs else "engine"
            if source in needs:
                parts.append(within(needs[source], wanted.axes)[0])
    if not parts:
        raise ValueError(f"expected kinds of {', '.join(KINDS)}, got {list(kinds)}: name one")
    means = [float(wanted.cost.of(d.names, d.points) @ d.weights) / d.total for d in parts]
    return Demand.mixture(parts, [1 / mean for mean in means])


def full_speed(arrivals: Sequence[Arrival], engine: SimulatedEngine) -> float:
    """At how many times the given speed requests arrive just as fast as they can be served."""
    duration = arrivals[-1].arrival_s - arrivals[0].arrival_s
    return duration / simulate(arrivals, engine, speed=None).seconds or 1.0
