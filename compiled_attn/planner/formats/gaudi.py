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
from compiled_attn.planner import CostModel, PlanReport, by_size
from compiled_attn.planner.formats.base import EnginePart
from compiled_attn.planner.simulator.engine import SimulatedEngine
from compiled_attn.planner.simulator.kinds import StepKind, step_kind
from compiled_attn.planner.simulator.simulated_steps import SeparateSteps
from graphs.buckets.ladders import explicit
from graphs.buckets.space import Axis

__all__ = ["decode_ladder", "parts", "prompt_ladder", "write"]

_LONG_CONTEXT = 8192
_REFERENCES = 3  # of a decode, in multiples of the blocks of the cache


class GaudiSteps(SeparateSteps):
    """The steps of an engine whose decodes count a block once for each request that reads it."""

    def blocks_of_decodes(self, step: Sequence[ScheduledTokens]) -> int:
        """Return the number of references to blocks."""
        size = self.engine.block_size
        return sum(-(-(part.sequence.computed + part.count) // size) for part in step)


def _spaced(low: int, step: int, high: int, count: int) -> list[int]:
    """Return sizes in equal ratios from ``low`` to ``high``, rounded up to multiples of ``step``.

    A ladder from 0 or 1 starts with that, followed by ``step``.
    """
    if count <= 1:
        return [high]
    start = step if low in (0, 1) else low
    ratios = [(high / start) ** (1.0 / (count - 1) * at) for at in range(count)]
    sizes = {math.ceil(start * ratio / step) * step for ratio in ratios}
    return sorted({low if low in (0, 1) else start, *(min(size, high) for size in sizes)})


def decode_ladder(engine: SimulatedEngine, context: int) -> list[tuple[int, int]]:
    """Return batches and blocks of the default ladder."""
    most = _max_references(engine, context)
    batches = _spaced(1, 2, engine.max_seqs, _points(engine.max_seqs))
    blocks = _spaced(1, engine.max_seqs, most, _points(most))
    longest = math.ceil(context / engine.block_size)
    return sorted({(n, min(b, n * longest)) for n in batches for b in blocks if n <= b})


def prompt_ladder(engine: SimulatedEngine, context: int) -> list[tuple[int, int]]:
    """Return tokens of a chunk and blocks of its context of the default ladder.

    Both are exponential. From 8,192 tokens of context on, the largest context of the ladder is that
    of a whole chunk, and each shorter chunk has its own, up to the model's context.
    """
    size = engine.block_size
    queries = _spaced(size, size, engine.max_tokens, math.ceil(math.log2(engine.max_tokens)))
    is_long = context >= _LONG_CONTEXT
    most = max(1, (context - (engine.max_tokens if is_long else size)) // size)
    contexts = _spaced(0, 1, most, 2 if most == 1 else _points(most))
    found = {(q, c) for q in queries for c in contexts}
    if is_long:
        found = {(q, c) for q, c in found if c != contexts[-1]}
        found |= {(q, (context - q) // size) for q in queries}
    fits = math.ceil((context - 1) / size)
    return sorted((q, c) for q, c in found if 0 <= c <= fits and q <= context)


def parts(engine: SimulatedEngine, context: int) -> list[EnginePart]:
    """Return prompts, counted in blocks because the cache is written by blocks, and decodes."""
    size, time = engine.block_size, engine.time

    def cost(need: Mapping[str, Any]) -> Any:
        tokens = need["chunk"] * size
        return tokens * (time.token + time.pair * (tokens + size * need["context"]))

    prompts, decodes = (step_kind(name, engine, context) for name in ("prefill", "decode"))
    prompts = StepKind(
        prompts.name,
        (Axis("chunk", 1, math.ceil(engine.max_tokens / size)), prompts.axes[1]),
        lambda need: (need["chunk"] - 1 + need["context"] - 1) * size < context,
        CostModel(cost),
        steps=GaudiSteps,
    )
    axes = (decodes.axes[0], Axis("blocks", 1, _max_references(engine, context)))
    decodes = replace(decodes, axes=axes, steps=GaudiSteps)
    chunks = [(-(-query // size), blocks) for query, blocks in prompt_ladder(engine, context)]
    batches = decode_ladder(engine, context)
    return [
        EnginePart("prompt", prompts, explicit(prompts.names, chunks), by_size, units=(size, 1)),
        EnginePart("decode", decodes, explicit(decodes.names, batches), by_size),
    ]


def write(plans: Mapping[str, PlanReport], engine: SimulatedEngine) -> str:
    """Return one tuple per line: batch, query, blocks; prompts first."""
    prompts, decodes = (
        sorted(bucket.sizes for bucket in plans[name].space) for name in ("prompt", "decode")
    )
    return "\n".join(
        [
            "# prompts: (batch, query, context blocks)",
            *(f"(1, {chunk * engine.block_size}, {context})" for chunk, context in prompts),
            "# decodes: (batch, 1, blocks)",
            *(f"({sequences}, 1, {blocks})" for sequences, blocks in decodes),
        ]
    )


def _max_references(engine: SimulatedEngine, context: int) -> int:
    longest = math.ceil(context / engine.block_size)
    return min(longest * engine.max_seqs, _REFERENCES * engine.blocks)


def _points(high: int) -> int:
    return math.ceil(math.log2(max(high, 1))) + 1
