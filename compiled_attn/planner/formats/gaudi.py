"""vLLM's Gaudi plugin: buckets of prompts and decodes, for ``VLLM_BUCKETING_FROM_FILE``.

As in vllm-project/vllm-gaudi (``vllm_gaudi/extension/bucketing``: ``exponential.py``,
``common.py``, ``file_strategy.py``) with its defaults of prefix caching and one prompt per step. A
bucket is ``(batch, query, blocks)``; the query of a decode is 1. A step goes to the *first* bucket
in the order of the tuples that fits, not to the cheapest; a step that fits none compiles while
serving. A decode counts each block once for every sequence that reads it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from compiled_attn.engine.scheduler import ScheduledTokens
from compiled_attn.planner import CostModel, by_size
from compiled_attn.planner.formats.base import EnginePart, Limits, Plans
from compiled_attn.planner.simulator.kinds import StepKind, decode, prefill
from compiled_attn.planner.simulator.simulated_steps import SeparateSteps
from graphs.buckets.ladders import explicit
from graphs.buckets.space import Axis, Bucket, BucketSpace

__all__ = ["TESTED", "decode_ladder", "parts", "prompt_ladder", "spaced", "write"]

TESTED = ("vllm-gaudi", ())  # sources and parser only: the plugin needs Gaudi's own torch

_LONG_CONTEXT = 8192
_LATE = "compiles while serving"
_REFERENCES = 3  # of a decode, in multiples of the blocks of the cache


class GaudiSteps(SeparateSteps):
    """The steps of an engine whose decodes count a block once for each request that reads it."""

    def blocks_of_decodes(self, step: Sequence[ScheduledTokens]) -> int:
        """Return the number of references to blocks."""
        size = self.engine.block_size
        return sum(-(-(part.sequence.computed + part.count) // size) for part in step)


def spaced(low: int, step: int, high: int, count: int) -> list[int]:
    """Return sizes in equal ratios from ``low`` to ``high``, rounded up to multiples of ``step``.

    A ladder from 0 or 1 starts with that, followed by ``step``.
    """
    if count <= 1:
        return [high]
    start = step if low in (0, 1) else low
    ratios = [(high / start) ** (1.0 / (count - 1) * at) for at in range(count)]
    sizes = {math.ceil(start * ratio / step) * step for ratio in ratios}
    return sorted({low if low in (0, 1) else start, *(min(size, high) for size in sizes)})


def decode_ladder(limits: Limits) -> list[tuple[int, int]]:
    """Return batches and blocks of the default ladder."""
    most = _max_references(limits)
    batches = spaced(1, 2, limits.max_seqs, _points(limits.max_seqs))
    blocks = spaced(1, limits.max_seqs, most, _points(most))
    return sorted({(n, min(b, n * limits.longest)) for n in batches for b in blocks if n <= b})


def prompt_ladder(limits: Limits) -> list[tuple[int, int]]:
    """Return tokens of a chunk and blocks of its context of the default ladder.

    Both are exponential. From 8,192 tokens of context on, the largest context of the ladder is that
    of a whole chunk, and each shorter chunk has its own, up to the model's context.
    """
    size, longest = limits.block_size, limits.context
    queries = spaced(size, size, limits.max_tokens, math.ceil(math.log2(limits.max_tokens)))
    is_long = longest >= _LONG_CONTEXT
    most = max(1, (longest - (limits.max_tokens if is_long else size)) // size)
    contexts = spaced(0, 1, most, 2 if most == 1 else _points(most))
    found = {(query, context) for query in queries for context in contexts}
    if is_long:
        found = {(q, c) for q, c in found if c != contexts[-1]}
        found |= {(query, (longest - query) // size) for query in queries}
    fits = math.ceil((longest - 1) / size)
    return sorted((q, c) for q, c in found if 0 <= c <= fits and q <= longest)


def parts(limits: Limits) -> list[EnginePart]:
    """Return prompts, counted in blocks because the cache is written by blocks, and decodes."""
    size = limits.block_size
    decodes = decode(limits.engine, limits.context)
    axes = (decodes.axes[0], Axis("blocks", 1, _max_references(limits)))
    return [
        EnginePart(
            "prompt",
            _prompts(limits),
            explicit(["chunk", "context"], [(-(-q // size), c) for q, c in prompt_ladder(limits)]),
            by_size,
            _LATE,
            units=(size, 1),
        ),
        EnginePart(
            "decode",
            replace(decodes, axes=axes, steps=GaudiSteps),
            explicit(["sequences", "blocks"], decode_ladder(limits)),
            by_size,
            _LATE,
        ),
    ]


def _prompts(limits: Limits) -> StepKind:
    size, time = limits.block_size, limits.engine.time
    contexts = prefill(limits.engine, limits.context).axes[1]

    def cost(need: Mapping[str, Any]) -> Any:
        tokens = need["chunk"] * size
        return tokens * (time.token + time.pair * (tokens + size * need["context"]))

    return StepKind(
        "prefill",
        (Axis("chunk", 1, math.ceil(limits.max_tokens / size)), contexts),
        lambda need: (need["chunk"] - 1 + need["context"] - 1) * size < limits.context,
        CostModel(cost),
        steps=GaudiSteps,
    )


def write(plans: Plans) -> str:
    """Return one tuple per line: batch, query, blocks; prompts first."""
    size = (plans["prompt"].part.units or (1,))[0]
    lines = ["# prompts: (batch, query, context blocks)"]
    lines += [
        f"(1, {b['chunk'] * size}, {b['context']})" for b in _sorted(plans["prompt"].report.space)
    ]
    lines += ["# decodes: (batch, 1, blocks)"]
    lines += [
        f"({b['sequences']}, 1, {b['blocks']})" for b in _sorted(plans["decode"].report.space)
    ]
    return "\n".join(lines)


def _sorted(space: BucketSpace) -> list[Bucket]:
    return sorted(space, key=lambda bucket: bucket.sizes)


def _max_references(limits: Limits) -> int:
    return min(limits.longest * limits.max_seqs, _REFERENCES * limits.blocks)


def _points(high: int) -> int:
    return math.ceil(math.log2(max(high, 1))) + 1
