"""Blocks that one long request holds where layers have a sliding window, and their bytes.

    python benchmarks/window_memory.py [--tokens 32768] [--step 512] [--block-size 16]

The engine's scheduler and block pool serve one request, without a model: `held` is the most blocks
used at a time if none is released, `released` if those before the window are. A model gives blocks
back if all of its layers have a window. For a model that mixes layers, `by kind` is what its
windowed layers would hold with blocks of their own beside the full ones, which is not built.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from compiled_attn.cache.blocks import BlockPool
from compiled_attn.engine import RequestState, SamplingParams, Scheduler

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
)


def peak(tokens: int, step: int, block_size: int, window: int | None) -> int:
    """Serves a prompt and its continuation; returns the most blocks used at a time."""
    pool = BlockPool(2 + tokens // block_size, block_size, window=window)
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


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--step", type=int, default=512)
    parser.add_argument("--block-size", type=int, default=16)
    options = parser.parse_args()
    sizes = options.tokens, options.step, options.block_size
    held = peak(*sizes, None)
    print("one request of {:,} tokens, steps of {}, blocks of {}".format(*sizes))
    names = "model|windowed + full layers|held|released|MiB held|MiB now|now / held|by kind"
    print(f"| {names.replace('|', ' | ')} |\n|{'---|' * 8}")
    for shape in SHAPES:
        released = peak(*sizes, shape.window)
        layers = shape.windowed + shape.full
        now = held if shape.full else released
        by_kind = (shape.windowed * released + shape.full * held) / (layers * held)
        block_mib = options.block_size * shape.token_bytes * layers / 2**20
        print(
            f"| {shape.name} | {shape.windowed} of {shape.window} + {shape.full} | {held:,} "
            f"| {released:,} | {held * block_mib:,.0f} | {now * block_mib:,.0f} "
            f"| {now / held:.3f} | {by_kind:.3f} |"
        )


if __name__ == "__main__":
    main()
