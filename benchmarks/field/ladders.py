"""The ladders of the field at their default parameters.

Rules and parameters are those of vLLM's plugin for Gaudi (``vllm_gaudi.extension.bucketing``:
exponential, padding-aware of pull request 762, unified). Buckets that no legal need reaches are
left out.
"""

from __future__ import annotations

import math

from compiled_attn.workloads.families import Family
from compiled_attn.workloads.ladders import highest, reachable, unified
from compiled_attn.workloads.simulate import SimulatedEngine
from graphs.buckets.ladders import explicit, exponential, padding_aware
from graphs.buckets.space import BucketSpace

PERCENTS = (10, 25, 50)
"""Relative padding limits of the padding-aware ladders."""

_LONG_CONTEXT = 8192


def ladders(name: str, family: Family, engine: SimulatedEngine) -> dict[str, BucketSpace]:
    """The ladders of the field for decode, prefill or mixed steps, by their names."""
    high = highest(family)
    found: dict[str, BucketSpace]
    if name == "decode":
        blocks = high["blocks"]
        found = {"exponential": _decode_exponential(high["sequences"], blocks)}
        for percent in PERCENTS:
            found[f"padding-aware {percent} %"] = padding_aware(
                sequences=(1, 2, high["sequences"], -(-high["sequences"] // 4), percent),
                blocks=_stepped(engine.block_size, blocks, -(-blocks // 4), percent),
            )
    elif name == "prefill":
        size, tokens = engine.block_size, high["tokens"]
        found = {"exponential": _prefill_exponential(size, tokens, high["context"])}
        for percent in PERCENTS:
            found[f"padding-aware {percent} %"] = padding_aware(
                tokens=_stepped(size, tokens, -(-tokens // 4), percent),
                context=(0, 2, high["context"], -(-tokens // size), percent),
            )
    else:
        points = {a.name: 10 + (a.low == 0) for a in family.axes if a.name != "logits"}
        found = {"unified": unified(family, points)}
    return {name: reachable(space, family) for name, space in found.items()}


def _decode_exponential(sequences: int, blocks: int) -> BucketSpace:
    rows = _one_and(2, sequences, _points(sequences), 2)
    columns = _one_and(min(sequences, blocks), blocks, _points(blocks), sequences)
    return explicit(["sequences"], rows) * explicit(["blocks"], columns)


def _one_and(low: int, high: int, points: int, multiple: int) -> list[int]:
    space = exponential(n=(min(low, high), high, points, multiple))
    return sorted({1, *(bucket.n for bucket in space)})


def _prefill_exponential(size: int, tokens: int, context: int) -> BucketSpace:
    is_long = context * size >= _LONG_CONTEXT
    rows = _half_linear(min(size, tokens), tokens, size, is_long)
    columns = {0} | _half_linear(1, context, 1, is_long) if context else {0}
    return explicit(["tokens"], sorted(rows)) * explicit(["context"], sorted(columns))


def _half_linear(low: int, high: int, step: int, is_long: bool) -> set[int]:
    """Exponential; for long contexts the lower half of the sizes is, and the rest is linear."""
    points = _points(high)
    if not is_long or points < 4:
        return {bucket.n for bucket in exponential(n=(low, high, points, step))}
    half, rest = points // 2, points - points // 2
    turn = high / points
    sizes = [low * (turn / low) ** (at / (half - 1)) for at in range(half)]
    sizes += [turn + at * (high - turn) / rest for at in range(1, rest + 1)]
    return {min(high, math.ceil(size / step - 1e-9) * step) for size in sizes}


def _points(high: int) -> int:
    return math.ceil(math.log2(max(high, 2))) + 1


def _stepped(step: int, high: int, absolute: int, percent: int) -> tuple[int, int, int, int, int]:
    return min(step, high), step, high, absolute, percent
