"""Ladders of serving engines at their default parameters.

Rules and parameters are those of vLLM's Gaudi plugin (``vllm_gaudi.extension.bucketing``:
exponential, padding-aware of pull request 762, unified), and of vLLM's CUDA graphs, which have one
axis of tokens. Unreachable buckets are left out.
"""

from __future__ import annotations

from collections.abc import Sequence

from compiled_attn.planner.formats import FORMATS, gaudi
from compiled_attn.planner.simulator import SimulatedEngine, Simulation
from compiled_attn.planner.simulator.kinds import StepKind
from compiled_attn.planner.simulator.ladders import highest, reachable, unified
from compiled_attn.workloads import Arrival
from graphs.buckets.ladders import explicit, padding_aware
from graphs.buckets.space import BucketSpace

PERCENTS = (10, 25, 50)
"""Relative padding limits of the padding-aware ladders."""


def ladders(
    name: str, kind: StepKind, engine: SimulatedEngine, context: int
) -> dict[str, BucketSpace]:
    """Return ladders for decode, prefill, mixed steps or tokens alone, by name."""
    high = highest(kind)
    found: dict[str, BucketSpace]
    if name == "decode":
        blocks = high["blocks"]
        found = {"exponential": _within(gaudi.decode_ladder(engine, context), kind)}
        for percent in PERCENTS:
            found[f"padding-aware {percent} %"] = padding_aware(
                sequences=(1, 2, high["sequences"], -(-high["sequences"] // 4), percent),
                blocks=_stepped(engine.block_size, blocks, -(-blocks // 4), percent),
            )
    elif name == "prefill":
        size, tokens = engine.block_size, high["tokens"]
        found = {"exponential": _within(gaudi.prompt_ladder(engine, context), kind)}
        for percent in PERCENTS:
            found[f"padding-aware {percent} %"] = padding_aware(
                tokens=_stepped(size, tokens, -(-tokens // 4), percent),
                context=(0, 2, high["context"], -(-tokens // size), percent),
            )
    elif name == "tokens":
        found = {"vLLM": FORMATS["vllm"].parts(engine, context)[0].default}
    else:
        points = {a.name: 10 + (a.low == 0) for a in kind.axes if a.name != "logits"}
        found = {"unified": unified(kind, points)}
    return {name: reachable(space, kind) for name, space in found.items()}


def _within(sizes: list[tuple[int, int]], kind: StepKind) -> BucketSpace:
    """Upstream's ladder, cut at the largest legal need."""
    tops = [axis.high for axis in kind.axes]
    return explicit(kind.names, [tuple(map(min, size, tops)) for size in sizes])


def _stepped(step: int, high: int, absolute: int, percent: int) -> tuple[int, int, int, int, int]:
    return min(step, high), step, high, absolute, percent


def full_speed(arrivals: Sequence[Arrival], at_once: Simulation) -> float:
    """Return the factor of speed at which requests arrive as fast as they are served.

    ``at_once`` is the simulation in which all arrive at once.
    """
    duration = arrivals[-1].arrival_s - arrivals[0].arrival_s
    return duration / at_once.seconds or 1.0
