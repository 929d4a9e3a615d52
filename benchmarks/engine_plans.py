"""Padding and graphs saved in other engines, compared with their default ladders.

For each public trace and engine the steps are simulated within the engine's limits. The plan is
made for the first half, and both are evaluated on the second by the engine's own picking rule: the
smallest sizes that fit a step, or the first bucket in order in vLLM's Gaudi plugin. Padding is the
cost of the buckets over the cost of the needs, less 1 (rows where there is one axis). Two budgets:
as many graphs as the ladder has, and half of them.

    python benchmarks/engine_plans.py --traces ../shared/traces --requests 4000
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from field.ladders import full_speed

from compiled_attn.planner import Demand
from compiled_attn.planner.formats import FORMATS, EnginePart, needs_of
from compiled_attn.planner.simulator import SimulatedEngine, simulate
from compiled_attn.workloads import Arrival, read_trace

TRACES = {
    "azure2023_conv.csv": 16384,
    "azure2023_code.csv": 9472,
    "mooncake_conversation_head.jsonl": 131072,
}
ENGINE = SimulatedEngine(max_tokens=8192, max_seqs=128, block_size=128, blocks=4096)


def compare(engine: str, part: EnginePart, needs: Demand) -> None:
    ladder = len(part.default)
    for graphs in (ladder, max(1, ladder // 2)):
        started = time.perf_counter()
        found = part.plan(needs, graphs, None)
        took = time.perf_counter() - started
        theirs, ours = found.theirs, found.ours
        print(
            f"  {engine:<13} {part.name:<7} {theirs.graphs:>4} {theirs.unused:>5} "
            f"{theirs.waste:>7.1%} | {ours.graphs:>4} {ours.waste:>7.1%}  "
            f"beyond {found.outside:.0%}, {took:.0f} s",
            flush=True,
        )


def speed_of(arrivals: list[Arrival], part: EnginePart, load: float) -> float:
    at_once = simulate(arrivals, ENGINE, speed=None, steps=part.kind.steps)
    return load * full_speed(arrivals, at_once)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traces", type=Path, default=Path("../shared/traces"))
    parser.add_argument("--requests", type=int, default=4000, help="of each trace")
    parser.add_argument("--load", type=float, default=0.8, help="1: arrivals just keep it busy")
    options = parser.parse_args()
    for file, context in TRACES.items():
        path = options.traces / file
        if not path.exists():
            print(f"{file}: left out, there is no {path}; give its folder with --traces")
            continue
        arrivals = read_trace(path, options.requests)
        print(f"{file}: {len(arrivals):,} requests at {options.load:g} of full load")
        print("  engine      steps   graphs unused padding | plan graphs, padding")
        for engine, known in FORMATS.items():
            parts = known.parts(ENGINE, context)
            speed = speed_of(arrivals, parts[0], options.load)
            needs = needs_of(parts, arrivals, ENGINE, speed=speed)
            for part in parts:
                compare(engine, part, needs[part.name])
        print(flush=True)


if __name__ == "__main__":
    main()
