"""Blocks that one long request holds where layers have a sliding window, and their bytes.

    python benchmarks/window_memory.py [--tokens 32768] [--step 512] [--block-size 16]

The engine's scheduler and block pool serve one request, without a model: `full` and `windowed` are
the most blocks that layers without and with a window use at a time, `held` the bytes if no block
were released. `cache` is the whole cache of an engine with ``max_seqs=1`` for such requests, over
`held`: it also has room for a cached prefix.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from compiled_attn import PagedKVCache
from compiled_attn.cache.blocks import BlockPool
from compiled_attn.cache.blocks.grouped import GroupedPool
from compiled_attn.cache.kv_cache import NearLayers
from compiled_attn.engine import EngineConfig, RequestState, SamplingParams, Scheduler
from compiled_attn.engine.cache_size import CacheSize

GENERATED = 256


@dataclass(frozen=True)
class Shape:
    """Layers of a model, and the bytes of a token in each of them (bfloat16)."""

    name: str
    windowed: int
    full: int
    window: int
    kv_heads: int
    head_dim: int

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values of a token in one layer."""
        return 2 * 2 * self.kv_heads * self.head_dim


SHAPES = (
    Shape("Mistral 7B v0.1", 32, 0, 4096, 8, 128),
    Shape("Gemma 3 1B", 22, 4, 512, 1, 256),
    Shape("Gemma 3 4B", 29, 5, 1024, 4, 256),
    Shape("gpt-oss 20B", 12, 12, 128, 8, 64),
)


def serve(pool: BlockPool, tokens: int, step: int) -> int:
    """Serves a prompt and its continuation; returns the most blocks used at a time."""
    scheduler = Scheduler(pool, step, 1)
    params = SamplingParams(max_new_tokens=GENERATED)
    request = RequestState(0, [1] * (tokens - GENERATED), tokens - GENERATED, params, 0.0)
    scheduler.add(request)
    while request.generated < GENERATED:
        scheduled = scheduler.schedule()
        if scheduled[0].needs_logits:
            request.tokens.append(1)
        scheduler.commit(scheduled)
    scheduler.finish(request)
    return pool.stats().peak_used


def cache_size(shape: Shape, tokens: int, step: int, block_size: int, full: int) -> CacheSize:
    """Computes the size of the cache of an engine for one request at a time."""
    near = NearLayers(tuple(range(shape.windowed)), shape.window, 2) if shape.full else None
    slot = PagedKVCache(
        shape.windowed + shape.full, 2, 1, shape.kv_heads, shape.head_dim, dtype=torch.bfloat16,
        window=None if shape.full else shape.window, near=near,
    )  # fmt: skip
    config = EngineConfig(step, 1, block_size=block_size, num_blocks=1 + full)
    return CacheSize.of(nn.Linear(1, 1), config, tokens, slot=slot, step=step)  # type: ignore[arg-type]


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--step", type=int, default=512)
    parser.add_argument("--block-size", type=int, default=16)
    options = parser.parse_args()
    tokens, step, size = options.tokens, options.step, options.block_size
    total = 2 + tokens // size
    held = serve(BlockPool(total, size), tokens, step)
    print(f"one request of {tokens:,} tokens, steps of {step}, blocks of {size}")
    names = "model|windowed + full layers|full|windowed|MiB held|MiB now|now / held|cache / held"
    print(f"| {names.replace('|', ' | ')} |\n|{'---|' * 8}")
    for shape in SHAPES:
        if shape.full:
            near = {"near_of": np.zeros(total, np.int32), "near_window": shape.window}
            pool = GroupedPool(total, size, num_near=total, **near)  # type: ignore[arg-type]
            full, windowed = serve(pool, tokens, step), pool.near.peak_needed
        else:
            full = windowed = serve(BlockPool(total, size, window=shape.window), tokens, step)
        layer_mib, layers = size * shape.token_bytes / 2**20, shape.windowed + shape.full
        before = layers * held * layer_mib
        now = (shape.windowed * windowed + shape.full * full) * layer_mib
        cache = cache_size(shape, tokens, step, size, full).bytes / 2**20
        print(
            f"| {shape.name} | {shape.windowed} of {shape.window} + {shape.full} "
            f"| {full if shape.full else 0:,} | {windowed:,} | {before:,.0f} | {now:,.0f} "
            f"| {now / before:.3f} | {cache / before:.3f} |"
        )


if __name__ == "__main__":
    main()
