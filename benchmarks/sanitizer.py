"""What the sanitizer costs: the time of a step with it over the time without, by turns.

    python benchmarks/sanitizer.py [--backend inductor] [--kernel auto] [--rounds 15] [--threads N]

Random weights in the shape of SmolLM2-135M, one process, two engines: decodes of 1 and 16 requests
after 512 tokens, and a prompt of 512 tokens. Medians, in milliseconds; with one thread of the
processor's time, which other processes do not change much.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from compiled_attn.engine import Engine, EngineConfig, SamplingParams
from graphs.report.surroundings import machine

CONTEXT = 512


def model() -> Any:
    """SmolLM2-135M with random weights."""
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=8192,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def engine(options: argparse.Namespace, *, sanitize: bool) -> Engine:
    """A warm engine."""
    config = EngineConfig(
        backend=options.backend, kernel=options.kernel, sanitize=sanitize, max_seqs=16,
        max_tokens_per_step=CONTEXT, num_blocks=1024, block_size=32, context=options.context,
        max_graphs=4, store=False,
    )  # fmt: skip
    made = Engine(model().requires_grad_(False), config)
    made.warmup()
    return made


def decodes(made: Engine, requests: int, rounds: int) -> Iterator[Callable[[], object]]:
    """Steps that decode so many requests, after their prompts."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(requests):
        prompt = torch.randint(1, 49152, (CONTEXT,), generator=generator).tolist()
        made.submit(prompt, SamplingParams(max_new_tokens=rounds + 40))
    while any(len(each.tokens) == each.prompt_len for each in made.scheduler.running) or (
        made.scheduler.waiting
    ):
        made.step()
    yield from [made.step] * rounds
    for each in made.open_requests:
        made.abort(each)


def prefills(made: Engine, rounds: int) -> Iterator[Callable[[], object]]:
    """Steps that compute a prompt."""
    generator = torch.Generator().manual_seed(2)
    for _ in range(rounds):
        prompt = torch.randint(1, 49152, (CONTEXT,), generator=generator).tolist()
        made.submit(prompt, SamplingParams(max_new_tokens=1))
        yield made.step


def main() -> None:
    """Prints the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, help="of torch; by default all cores")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    # On a busy machine only the time of the processor says something.
    clock = time.process_time if options.threads == 1 else time.perf_counter
    print(machine(), clock.__name__, flush=True)
    both = [engine(options, sanitize=each) for each in (False, True)]
    loads = {
        "decode 1": lambda made: decodes(made, 1, options.rounds),
        "decode 16": lambda made: decodes(made, 16, options.rounds),
        "prefill 512": lambda made: prefills(made, options.rounds),
    }
    for name, load in loads.items():
        times: tuple[list[float], list[float]] = [], []
        for steps in zip(*map(load, both), strict=True):
            gc.collect()
            for number, step in enumerate(steps):
                start = clock()
                step()
                times[number].append(1e3 * (clock() - start))
        plain, checked = map(statistics.median, times)
        ratio = checked / plain
        print(f"{name:12} {plain:8.2f} -> {checked:8.2f} ms, {ratio:.3f} times", flush=True)


if __name__ == "__main__":
    main()
