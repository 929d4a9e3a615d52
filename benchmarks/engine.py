"""Generated tokens per second: our engine against plain `generate` and against `generate_batch`.

    python benchmarks/engine.py [--trace FILE] [--requests 40] [--rounds 3] [--tokens 256]

The default model (4-layer, 256-wide Llama, float32, random weights) and the first requests of the
trace, every request with its own output length, greedy. All three run in one process, in turns;
medians over the rounds, compile and warmup excluded for all. KV is hot or cold as the serving
leaves it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from peers.workers.batch import generate_batch
from transformers import PreTrainedModel

from compiled_attn import workloads as demand
from compiled_attn.engine import Engine, EngineConfig, SamplingParams
from compiled_attn.models import default_model

TRACE = Path(__file__).resolve().parents[2] / "shared/traces/mooncake_conversation_tiny.jsonl"
Requests = list[tuple[list[int], int]]


def ours(model: PreTrainedModel, tokens: int) -> Callable[[Requests], int]:
    """A warmed-up engine, inductor backend, prefix cache on."""
    engine = Engine(model, EngineConfig(max_tokens_per_step=tokens))
    seconds = engine.warmup().elapsed_seconds
    print(f"# ours: {len(engine.sizing.buckets)} graphs, warmup {seconds:.1f} s")

    def serve(requests: Requests) -> int:
        params = [SamplingParams(max_new_tokens=new, ignore_eos=True) for _, new in requests]
        results = engine.generate([prompt for prompt, _ in requests], params)
        return sum(len(result.tokens) for result in results)

    return serve


def plain_generate(model: PreTrainedModel) -> Callable[[Requests], int]:
    """`model.generate`, one request at a time, SDPA attention, dynamic cache."""
    model.set_attn_implementation("sdpa")

    def serve(requests: Requests) -> int:
        total = 0
        for prompt, new in requests:
            ids = torch.tensor([prompt])
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False
            )
            total += out.shape[1] - len(prompt)
        return total

    return serve


def batched(model: PreTrainedModel, tokens: int) -> Callable[[Requests], int]:
    """transformers' continuous batching with the sizes of our engine."""
    serve = generate_batch(model, tokens)

    def count(requests: Requests) -> int:
        prompts, new = zip(*requests, strict=True)
        return sum(map(len, serve([*prompts], [*new])))

    return count


def main() -> None:
    """Prints tokens/s of each, and the ratio of ours to the better of the others."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=256, help="tokens in a step at most")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if not options.trace.is_file():
        print(f"# {options.trace}: skipped, no such file (--trace names another)")
        return

    arrivals = demand.read_trace(options.trace, options.requests)
    print(
        f"# {len(arrivals)} requests, {sum(a.prompt_tokens for a in arrivals)} prompt tokens, "
        f"{sum(a.output_tokens for a in arrivals)} to generate; "
        f"float32, {options.threads} threads, torch {torch.__version__}"
    )
    systems = {
        "ours": ours(default_model(), options.tokens),
        "generate": plain_generate(default_model()),
        "generate_batch": batched(default_model(), options.tokens),
    }
    rates: dict[str, list[float]] = {name: [] for name in systems}
    for round_ in range(options.rounds):
        # Other tokens in every round: no prefix cache remembers the round before.
        prompts = demand.prompts(arrivals, default_model().config.vocab_size, seed=round_)
        requests = [(list(p), a.output_tokens) for p, a in zip(prompts, arrivals, strict=True)]
        for name, serve in systems.items():
            started = time.perf_counter()
            with torch.no_grad():
                generated = serve(requests)
            rates[name].append(generated / (time.perf_counter() - started))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    best = max(medians["generate"], medians["generate_batch"])
    for name, values in rates.items():
        print(
            f"{name:15} {medians[name]:8.1f} tokens/s  "
            f"(min {min(values):.1f}, max {max(values):.1f})  "
            f"ours is {medians['ours'] / medians[name]:.2f}x"
        )
    print(f"ours / better of the others: {medians['ours'] / best:.2f}x")


if __name__ == "__main__":
    main()
