"""Buckets for other engines: the ladder, the bucket choice and the syntax of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from compiled_attn.planner import Demand, PlanReport, plan
from compiled_attn.planner.formats import gaudi, sglang, vllm
from compiled_attn.planner.formats.base import EnginePart, EnginePlan, Limits, Written
from compiled_attn.planner.simulator.kinds import within
from compiled_attn.planner.simulator.ladders import ladders_within
from compiled_attn.planner.simulator.simulate import simulate
from compiled_attn.workloads import Arrival

__all__ = ["FORMATS", "EnginePart", "EnginePlan", "Format", "Limits", "needs_of", "planned_for"]


@dataclass(frozen=True)
class Format:
    """An engine's buckets, from its limits to its syntax.

    Args:
        package: of the engine.
        tested: what the tested versions begin with; none: its sources were read only.
        parts: that it has buckets for.
        written: the text of plans.
        use: how the engine is given that text, in a ``{file}``.
    """

    package: str
    tested: tuple[str, ...]
    parts: Callable[[Limits], list[EnginePart]]
    written: Written
    use: str


FORMATS: Mapping[str, Format] = {
    "vllm": Format(
        *vllm.TESTED,
        vllm.parts,
        vllm.written,
        'vllm serve MODEL --compilation-config "$(cat {file})"',
    ),
    "vllm-gaudi": Format(
        *gaudi.TESTED,
        gaudi.parts,
        gaudi.written,
        "VLLM_BUCKETING_FROM_FILE={file} vllm serve MODEL",
    ),
    "sglang": Format(
        *sglang.TESTED,
        sglang.parts,
        sglang.written,
        "python -m sglang.launch_server --model-path MODEL $(cat {file})",
    ),
}


def needs_of(
    parts: Sequence[EnginePart],
    arrivals: Sequence[Arrival],
    limits: Limits,
    *,
    speed: float | None = None,
    concurrency: int | None = None,
) -> dict[str, Demand]:
    """What the steps of requests need, by part: simulated with the engine's limits."""
    steps = parts[0].family.steps
    found = simulate(arrivals, limits.engine, speed=speed, concurrency=concurrency, steps=steps)
    families = {"prompt": "prefill", "decode": "decode", "steps": "table"}
    return {part.name: part.measured(found.needs[families[part.name]]) for part in parts}


def planned_for(
    part: EnginePart, needs: Demand, max_graphs: int, rho: float | None, drift: bool = True
) -> EnginePlan:
    """Plan a part for the worst of the demands near ``needs``, and judge it on their second half.

    Without ``drift`` it is planned for ``needs`` alone.

    Both the plan and the ladder are judged by the engine's own rule of picking, on the second half,
    for which the judged plan was not made.

    Raises:
        ValueError: what `compiled_attn.planner.plan` raises.
    """
    first, second = needs.halves()
    kept, outside = within(needs, part.family.axes)
    early, _ = within(first, part.family.axes)
    late, _ = within(second, part.family.axes)
    ladders = {**ladders_within(part.family, max_graphs), "default": part.default}

    def made(demand: Demand) -> PlanReport:
        return plan(
            part.family.foreseen(demand),
            part.family.cost,
            max_graphs,
            axes=part.family.axes,
            legal=part.family.legal,
            rho=rho,
            drift=drift,
            ladders=ladders,
            order=part.order,
        )

    return EnginePlan(
        part,
        made(kept),
        made(early).judge(late),
        part.judge(part.default, late),
        outside,
    )
