"""The ladders of the field at their default parameters.

Rules and parameters are those of vLLM's plugin for Gaudi (``vllm_gaudi.extension.bucketing``:
exponential, padding-aware of pull request 762, unified), and of vLLM's CUDA graphs, which know
tokens only. Buckets that no legal need reaches are left out.
"""

from __future__ import annotations

from compiled_attn.planner.formats import Limits, gaudi, vllm
from compiled_attn.planner.simulator.kinds import Family
from compiled_attn.planner.simulator.ladders import highest, reachable, unified
from compiled_attn.planner.simulator.simulate import SimulatedEngine
from graphs.buckets.ladders import explicit, padding_aware
from graphs.buckets.space import BucketSpace

PERCENTS = (10, 25, 50)
"""Relative padding limits of the padding-aware ladders."""


def ladders(
    name: str, family: Family, engine: SimulatedEngine, context: int
) -> dict[str, BucketSpace]:
    """The ladders of the field for decode, prefill, mixed steps or tokens alone, by their names."""
    limits = limits_of(engine, context)
    high = highest(family)
    found: dict[str, BucketSpace]
    if name == "decode":
        blocks = high["blocks"]
        found = {"exponential": _within(gaudi.decode_ladder(limits), family)}
        for percent in PERCENTS:
            found[f"padding-aware {percent} %"] = padding_aware(
                sequences=(1, 2, high["sequences"], -(-high["sequences"] // 4), percent),
                blocks=_stepped(engine.block_size, blocks, -(-blocks // 4), percent),
            )
    elif name == "prefill":
        size, tokens = engine.block_size, high["tokens"]
        found = {"exponential": _within(gaudi.prompt_ladder(limits), family)}
        for percent in PERCENTS:
            found[f"padding-aware {percent} %"] = padding_aware(
                tokens=_stepped(size, tokens, -(-tokens // 4), percent),
                context=(0, 2, high["context"], -(-tokens // size), percent),
            )
    elif name == "tokens":
        found = {"vLLM": vllm.parts(limits)[0].default}
    else:
        points = {a.name: 10 + (a.low == 0) for a in family.axes if a.name != "logits"}
        found = {"unified": unified(family, points)}
    return {name: reachable(space, family) for name, space in found.items()}


def limits_of(engine: SimulatedEngine, context: int) -> Limits:
    """The same limits, as other engines take them."""
    return Limits(engine.max_seqs, engine.max_tokens, engine.block_size, engine.blocks, context)


def _within(sizes: list[tuple[int, int]], family: Family) -> BucketSpace:
    """Upstream's ladder, cut at the largest legal need."""
    tops = [axis.high for axis in family.axes]
    return explicit(family.names, [tuple(map(min, size, tops)) for size in sizes])


def _stepped(step: int, high: int, absolute: int, percent: int) -> tuple[int, int, int, int, int]:
    return min(step, high), step, high, absolute, percent
