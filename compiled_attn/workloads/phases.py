"""Families of the steps of other engines: decodes, prefills, and both together without logits."""

from __future__ import annotations

from dataclasses import replace

from compiled_attn.workloads.families import Family, family
from compiled_attn.workloads.simulate import SimulatedEngine
from compiled_attn.workloads.simulated.separate import SeparateSteps
from graphs.buckets.axes import Axis
from graphs.planner import CostModel


def decode(engine: SimulatedEngine, context: int) -> Family:
    """Over sequences and the distinct blocks that they read."""
    time, longest = engine.time, _longest(engine, context)
    read = time.block_slot * engine.block_size
    return Family(
        "decode",
        (
            Axis("sequences", 1, engine.max_seqs),
            Axis("blocks", 1, min(engine.blocks, engine.max_seqs * longest)),
        ),
        lambda n: (n["sequences"] <= n["blocks"]) & (n["blocks"] <= n["sequences"] * longest),
        CostModel(lambda n: time.token * n["sequences"] + read * n["blocks"]),
        steps=SeparateSteps,
    )


def prefill(engine: SimulatedEngine, context: int) -> Family:
    """Over the tokens of a chunk and the blocks that its prompt has in the cache."""
    time, size = engine.time, engine.block_size
    return Family(
        "prefill",
        (Axis("tokens", 1, engine.max_tokens), Axis("context", 0, _longest(engine, context))),
        lambda n: n["tokens"] + (n["context"] - 1) * size < context,
        CostModel(
            lambda n: n["tokens"] * (time.token + time.pair * (n["tokens"] + size * n["context"]))
        ),
        steps=SeparateSteps,
    )


def mixed(engine: SimulatedEngine, context: int) -> Family:
    """The engine's own, over tokens, shared and unique blocks."""
    whole = family("engine", engine, context)
    return replace(whole, axes=whole.axes[:3], legal=lambda n: whole.legal({**n, "logits": 0}))


def _longest(engine: SimulatedEngine, context: int) -> int:
    return min(-(-context // engine.block_size), engine.blocks)
