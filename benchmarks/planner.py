"""Padding of usual ladders and of planned buckets on held-out traffic.

    python benchmarks/planner.py --traces ../shared/traces

For each trace an engine of 128 sequences is simulated; everything is planned on the first half of
its steps and evaluated on the second. Waste is the cost of the buckets used over the cost of the
needs, less 1, without the constant part of a step (which would make every figure smaller). A ladder
of more than 256 graphs is compared with a plan of 256.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from field.ladders import full_speed, ladders

from compiled_attn.planner import Demand, Judgement, PlanReport, judge, plan
from compiled_attn.planner.formats import FORMATS
from compiled_attn.planner.simulator import SimulatedEngine, simulate
from compiled_attn.planner.simulator.kinds import StepKind, step_kind, within
from compiled_attn.planner.simulator.ladders import ladders_within
from compiled_attn.workloads import Arrival, read_trace
from graphs.buckets.learned import buckets_for

MOST_GRAPHS = 256


def mixed(engine: SimulatedEngine, context: int) -> StepKind:
    """This engine's steps, over tokens, shared and unique blocks."""
    whole = step_kind("engine", engine, context)
    return replace(whole, axes=whole.axes[:3], legal=lambda n: whole.legal({**n, "logits": 0}))


def tokens(engine: SimulatedEngine, context: int) -> StepKind:
    """Steps by their tokens alone, up to vLLM's largest graph."""
    return FORMATS["vllm"].parts(engine, context)[0].kind


KINDS_OF_STEPS = {
    "decode": partial(step_kind, "decode"),
    "prefill": partial(step_kind, "prefill"),
    "mixed": mixed,
    "tokens": tokens,
}
GOAL_AT_64 = {"decode": 0.08, "prefill": 0.05, "mixed": 0.13, "tokens": 0.05}
ENGINE = SimulatedEngine(max_tokens=8192, max_seqs=128, block_size=128, blocks=4096)
GOAL_RATIO = 1 / 3
GUARD = 3.0


@dataclass(frozen=True)
class Trace:
    """A trace, and the longest request that its engine takes."""

    file: str
    context: int


TRACES = (
    Trace("azure2023_conv.csv", 16384),
    Trace("azure2023_code.csv", 9472),
    Trace("mooncake_conversation_head.jsonl", 131072),
)


@dataclass(frozen=True)
class Scene:
    """One kind of steps of one trace, in halves."""

    trace: Trace
    name: str
    kind: StepKind
    first: Demand
    second: Demand

    def plan(self, graphs: int, demand: Demand | None = None) -> PlanReport:
        kind = self.kind
        return plan(
            demand or self.first, kind.cost, graphs, axes=kind.axes, legal=kind.legal, rho=GUARD
        )


def scenes(
    trace: Trace, arrivals: list[Arrival], load: float, kinds: Sequence[str]
) -> Iterator[Scene]:
    for name in kinds:
        kind = KINDS_OF_STEPS[name](ENGINE, trace.context)
        at_once = simulate(arrivals, ENGINE, speed=None, steps=kind.steps)
        speed = load * full_speed(arrivals, at_once)
        started = time.perf_counter()
        needs = simulate(arrivals, ENGINE, speed=speed, steps=kind.steps).needs
        took = time.perf_counter() - started
        print(f"  {name} steps: {len(needs[kind.name]):,} simulated in {took:.1f} s")
        demand, cut = within(needs[kind.name], kind.axes)
        first, second = demand.halves()
        if cut:
            print(f"  {name}: {cut:.2%} of the steps are larger than a bucket may be, left out")
        yield Scene(trace, name, kind, first, second)


class Score:
    """Goals, and how many of them were reached."""

    def __init__(self) -> None:
        self.met: list[bool] = []

    def verdict(self, met: bool) -> str:
        self.met.append(met)
        return "met" if met else "MISSED"


def compare(scene: Scene, score: Score, parts: Sequence[str]) -> None:
    print(f"\n  {scene.name} ({', '.join(scene.kind.names)})")
    for name in parts:
        PARTS[name](scene, score)


def beside_ladders(scene: Scene, score: Score) -> None:
    """Compare a plan with each usual ladder at the same number of graphs."""
    kind = scene.kind
    print(f"  {'ladder':<18} graphs unused   waste | plan: graphs   waste  ratio  goal <= 0.33")
    plans: dict[int, Judgement] = {}
    for name, space in ladders(scene.name, kind, ENGINE, scene.trace.context).items():
        found = judge(space, scene.second, kind.cost)
        count = min(len(space), MOST_GRAPHS)
        if count not in plans:
            plans[count] = scene.plan(count).judge(scene.second)
        ours = plans[count]
        ratio = ours.waste / found.waste if found.waste else 0.0
        print(
            f"  {name:<18} {found.graphs:>6} {found.unused:>6} {found.waste:>7.1%} |"
            f"       {ours.graphs:>6} {ours.waste:>7.1%} {ratio:>6.2f}  "
            f"{score.verdict(ratio <= GOAL_RATIO)}"
        )


def at_64(scene: Scene, score: Score) -> None:
    name = scene.name
    started = time.perf_counter()
    report = scene.plan(64)
    took = time.perf_counter() - started
    held = report.judge(scene.second)
    hindsight = scene.plan(64, scene.second)
    goal = GOAL_AT_64[name]
    print(
        f"  64 graphs, planned in {took:.1f} s: waste {held.waste:.1%}, goal <= {goal:.0%}: "
        f"{score.verdict(held.waste <= goal)}"
    )
    print(
        f"    on the first half {report.waste:.1%}; planned on the second half itself "
        f"{hindsight.waste:.1%}"
    )
    print(f"    missed {held.missed:.2%}, goal 0: {score.verdict(held.missed == 0)}")
    guard = f"    any legal need pays at most {report.guard:.2f} times its cost"
    if name == "decode":
        guard += f", goal <= {GUARD:g}: {score.verdict(report.guard <= GUARD * (1 + 1e-9))}"
    print(f"{guard}; the worst of the second half paid {held.worst:.2f}")


def learned(scene: Scene, score: Score) -> None:
    """Compare a ladder of 24 with the same and eight buckets learned on the first half."""
    kind = scene.kind
    ladder = ladders_within(kind, 24)["exponential"].with_cost(kind.cost)
    first = scene.first.project(ladder.names).histogram()
    counts = dict(zip(map(tuple, first.points.tolist()), first.weights.tolist(), strict=True))
    started = time.perf_counter()
    space = buckets_for(counts, ladder, len(ladder) + 8)
    took = time.perf_counter() - started
    before, after = (judge(each, scene.second, kind.cost) for each in (ladder, space))
    print(
        f"  exponential ladder of {len(ladder)}: waste {before.waste:.1%}; with "
        f"{len(space) - len(ladder)} learned in {took:.1f} s {after.waste:.1%}: "
        f"{score.verdict(after.waste <= before.waste)}"
    )


PARTS = {"ladders": beside_ladders, "64": at_64, "learned": learned}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, default=Path("../shared/traces"))
    parser.add_argument("--parts", nargs="+", default=[*PARTS], choices=PARTS)
    parser.add_argument("--kinds", nargs="+", default=[*KINDS_OF_STEPS], choices=KINDS_OF_STEPS)
    parser.add_argument("--only", nargs="+", metavar="FILE", help="these traces")
    parser.add_argument("--load", type=float, default=1.0, help="1: arrivals just keep it busy")
    options = parser.parse_args()
    score = Score()
    for trace in TRACES:
        if options.only and trace.file not in options.only:
            continue
        path = options.traces / trace.file
        if not path.exists():
            print(f"{trace.file}: left out, there is no {path}; give its folder with --traces")
            continue
        arrivals = read_trace(path)
        print(f"{trace.file}: {len(arrivals):,} requests at {options.load:g} of full load")
        for scene in scenes(trace, arrivals, options.load, options.kinds):
            compare(scene, score, options.parts)
        print()
    print(f"{sum(score.met)} of {len(score.met)} goals met")


if __name__ == "__main__":
    main()
