"""Buckets for other engines: the default ladder, the picking rule and the syntax of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from compiled_attn.planner import Demand
from compiled_attn.planner.formats import gaudi, sglang, vllm
from compiled_attn.planner.formats.base import EnginePart, EnginePlan, Limits, Plans
from compiled_attn.planner.simulator import simulate
from compiled_attn.planner.simulator.kinds import within
from compiled_attn.planner.simulator.ladders import SplitPlan
from compiled_attn.workloads import Arrival

__all__ = ["FORMATS", "EnginePart", "EnginePlan", "Format", "Limits", "needs_of", "planned_for"]


@dataclass(frozen=True)
class Format:
    """The format of an engine.

    Args:
        package: of the engine.
        tested: prefixes of the tested versions; empty: only its sources were read.
        parts: that have buckets, for the engine's limits.
        write: formats plans as the engine reads them.
        use: how to pass that text to the engine, as a ``{file}``.
    """

    package: str
    tested: tuple[str, ...]
    parts: Callable[[Limits], list[EnginePart]]
    write: Callable[[Plans], str]
    use: str


FORMATS: Mapping[str, Format] = {
    "vllm": Format(
        *vllm.TESTED,
        vllm.parts,
        vllm.write,
        'vllm serve MODEL --compilation-config "$(cat {file})"',
    ),
    "vllm-gaudi": Format(
        *gaudi.TESTED,
        gaudi.parts,
        gaudi.write,
        "VLLM_BUCKETING_FROM_FILE={file} vllm serve MODEL",
    ),
    "sglang": Format(
        *sglang.TESTED,
        sglang.parts,
        sglang.write,
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
    """Simulate requests within the engine's limits; returns the needs of each part."""
    steps = parts[0].kind.steps
    found = simulate(arrivals, limits.engine, speed=speed, concurrency=concurrency, steps=steps)
    return {part.name: part.measure(found.needs[part.kind.name]) for part in parts}


def planned_for(part: EnginePart, needs: Demand, max_graphs: int, rho: float | None) -> EnginePlan:
    """Plan a part for all needs, and evaluate a plan of their first half on the second.

    Raises:
        ValueError: see `compiled_attn.planner.plan`.
    """
    found = SplitPlan(part.kind, needs, part.default, max_graphs, rho, part.order)
    late, _ = within(found.second, part.kind.axes)
    theirs, ours = part.judge(part.default, late), found.early.judge(late)
    return EnginePlan(part, found.whole(), ours, theirs, found.outside)
