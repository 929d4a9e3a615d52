"""A million short requests through one engine: memory and step time must not grow.

    python benchmarks/soak_engine.py [--requests 1000000] [--seed 0]

A one-layer Llama of random weights, backend eager, prompts of 1 to 12 tokens of which half begin
alike, 1 to 3 new tokens each. Prints a row for every tenth of the requests: resident memory, the
median time of a step over that of the first tenth, and the time of `report()` in such steps. Ends
with exit status 1 if memory grew by more than 16 MiB after the first tenth, if a step became half
as slow again, or if a request got the wrong number of tokens or a block leaked.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from compiled_attn.engine import Engine, EngineConfig, SamplingParams

VOCAB = 256
BATCH = 2000


def engine() -> Engine:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=VOCAB, num_hidden_layers=1, max_position_embeddings=64, **sizes)
    made = Engine(
        LlamaForCausalLM(config).eval(),
        EngineConfig(256, 64, block_size=4, num_blocks=1024, max_graphs=4, backend="eager"),
    )
    made.warmup()
    return made


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def serve(made: Engine, count: int, rng: np.random.Generator) -> list[float]:
    """Serves requests; returns the seconds of each step."""
    lengths, new = rng.integers(1, 13, count), rng.integers(1, 4, count)
    prompts = [rng.integers(0, VOCAB, n).tolist() for n in lengths]
    for prompt in prompts[::2]:
        prompt[:8] = range(min(8, len(prompt)))
    params = [SamplingParams(int(n), ignore_eos=True) for n in new]
    seconds: list[float] = []
    done = 0
    for result in made.generate(
        prompts, params, concurrency=256, on_step=lambda info: seconds.append(info.step.seconds)
    ):
        done += len(result.tokens) == new[result.index]
    if done != count or made.pool.stats().used:
        sys.exit(f"violation: {count - done} requests are wrong, {made.pool.stats()}")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng, made, first = np.random.default_rng(options.seed), engine(), (0.0, 0.0)
    for tenth in range(1, 11):
        seconds: list[float] = []
        for start in range(0, options.requests // 10, BATCH):
            seconds += serve(made, min(BATCH, options.requests // 10 - start), rng)
        step = statistics.median(seconds)
        started = time.perf_counter()
        report = made.report()
        reporting = (time.perf_counter() - started) / step
        gc.collect()
        memory = resident_mib()
        first = first if tenth > 1 else (memory, step)
        print(
            f"{report.requests:>9,} requests, {report.steps:>8,} steps: {memory:7.1f} MiB, "
            f"step {step / first[1]:4.2f}x of the first, report() {reporting:4.2f} steps",
            flush=True,
        )
    if memory - first[0] > 16 or step > 1.5 * first[1]:
        sys.exit("violation: it grows")


if __name__ == "__main__":
    main()
