"""Tokens sampled in random traffic with `same_bits`, scored again, and what it costs.

    python benchmarks/same_bits.py [--dtypes float32 bfloat16] [--tokens 10000] [--drawn]

SmolLM2-135M (with `--drawn` random weights of its shape): prompts of 1 to 400 tokens, of which half
share a prefix, 16 requests at a time in a cache that is too small for them, seeds, temperature 1.
Prints how many bits of the log-probabilities differ from `compiled_attn.score`, whose model has
another copy of the weights; and tokens per second of this traffic and of prompts of 512 tokens,
with and without `same_bits`.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from compiled_attn import Scorer
from compiled_attn.engine import Engine, EngineConfig, SamplingParams
from compiled_attn.models import load_model, plain_folder

NEW = 200
CONFIG = EngineConfig(
    max_seqs=16, num_blocks=150, context=1024, store=True, max_graphs=12, block_size=32
)


def prompts_of(count: int, vocab: int) -> list[list[int]]:
    """Random prompts, of which half begin with the same 96 tokens."""
    rng = np.random.default_rng(0)
    shared = rng.integers(1, vocab, 96).tolist()
    lengths = rng.integers(1, 305, count).tolist()
    own = [rng.integers(1, vocab, length).tolist() for length in lengths]
    return [shared * (index % 2) + each for index, each in enumerate(own)]


def served(
    folder: Path, dtype: torch.dtype, count: int, *, same_bits: bool
) -> tuple[list[list[int]], list[list[float]], tuple[float, float]]:
    """Serves the traffic; prints its speed; returns sequences, log-probabilities and tokens per
    second of the traffic and of the prompts."""
    config = EngineConfig(
        **{name: getattr(CONFIG, name) for name in CONFIG.__slots__} | {"same_bits": same_bits}
    )
    engine = Engine(load_model(folder, dtype), config)
    start = time.perf_counter()
    engine.warmup()
    warm = time.perf_counter() - start
    vocab = engine.executor.sizing.vocab
    prompts = prompts_of(-(-count // NEW), vocab)
    params = [
        SamplingParams(max_new_tokens=NEW, temperature=1.0, seed=seed, logprobs=0, ignore_eos=True)
        for seed in range(len(prompts))
    ]
    start = time.perf_counter()
    results = [*engine.generate(prompts, params, in_order=True)]
    seconds = time.perf_counter() - start
    report = engine.report()
    long = [np.random.default_rng(seed).integers(1, vocab, 512).tolist() for seed in range(8)]
    start = time.perf_counter()
    list(engine.generate(long, SamplingParams(max_new_tokens=1)))
    prompt_speed = 512 * len(long) / (time.perf_counter() - start)
    made = sum(len(result.tokens) for result in results)
    print(
        f"| {str(dtype)[6:]} | {same_bits} | {made / seconds:.0f} | {prompt_speed:.0f} | "
        f"{report.preemptions} | {warm:.0f} |",
        flush=True,
    )
    engine.executor.close()
    sequences = [[*p, *r.tokens] for p, r in zip(prompts, results, strict=True)]
    logprobs = [[each.logprob for each in result.logprobs] for result in results]
    return sequences, logprobs, (made / seconds, prompt_speed)


def differing(
    folder: Path,
    dtype: torch.dtype,
    sequences: Sequence[Sequence[int]],
    logprobs: Sequence[Sequence[float]],
) -> tuple[int, int]:
    """How many log-probabilities differ from those of a `Scorer` in any bit, of how many."""
    scorer = Scorer(load_model(folder, dtype), CONFIG)
    different = 0
    for tokens, own in zip(sequences, logprobs, strict=True):
        expected = scorer.score(tokens)[-len(own) :].view(torch.int64)
        different += int(
            (torch.tensor(own, dtype=torch.float64).view(torch.int64) != expected).sum()
        )
    scorer.close()
    return different, sum(map(len, logprobs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--tokens", type=int, default=10_000)
    parser.add_argument("--drawn", action="store_true")
    options = parser.parse_args()
    if options.drawn:
        from peers.model import model_directory

        folder = Path(model_directory())
    else:
        folder = plain_folder("smollm2")
    print("| dtype | same bits | traffic, tokens/s | prompts, tokens/s | preemptions | warmup, s |")
    print("|---|---|---|---|---|---|")
    for name in options.dtypes:
        dtype = getattr(torch, name)
        *found, with_bits = served(folder, dtype, options.tokens, same_bits=True)
        gc.collect()
        *_, without = served(folder, dtype, options.tokens, same_bits=False)
        gc.collect()
        costs = [f"{other / own:.2f}" for own, other in zip(with_bits, without, strict=True)]
        print(f"{name}: traffic takes {costs[0]} times as long with same_bits, prompts {costs[1]}")
        different, count = differing(folder, dtype, *found)
        print(f"{name}: {different} of {count} log-probabilities differ in a bit", flush=True)
        gc.collect()


if __name__ == "__main__":
    main()
