"""Generated tokens per second: our engine against plain `generate` and against `generate_batch`.

    python benchmarks/engine.py [--trace FILE] [--requests 40] [--rounds 3] [--tokens 256]
                                [--against DIRECTORY]

The default model (4-layer, 256-wide Llama, float32, random weights) and the first requests of the
trace, every request with its own output length, greedy. All three run in one process, interleaved;
medians over the rounds, compile and warmup excluded.

With ``--against`` only ours, interleaved with a second process that imports the checkout in that
directory.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from native.against import answer, other_process
from peers.workers.batch import generate_batch
from transformers import PreTrainedModel

from compiled_attn import workloads as demand
from compiled_attn.engine import Engine, EngineConfig, SamplingParams
from compiled_attn.models import default_model
from graphs.report.surroundings import machine

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


def rate(serve: Callable[[Requests], int], requests: Requests) -> float:
    """Generated tokens per second."""
    started = time.perf_counter()
    with torch.no_grad():
        generated = serve(requests)
    return generated / (time.perf_counter() - started)


def requests_of_rounds(arrivals: list[demand.Arrival]) -> Iterator[Requests]:
    """Yields different tokens in every round, so that no prefix cache helps."""
    for seed in itertools.count():
        prompts = demand.prompts(arrivals, default_model().config.vocab_size, seed=seed)
        yield [(list(p), a.output_tokens) for p, a in zip(prompts, arrivals, strict=True)]


def all_systems(tokens: int) -> dict[str, Callable[[Requests], float]]:
    """Ours and the alternatives: tokens/s of requests."""
    made = {
        "ours": ours(default_model(), tokens),
        "generate": plain_generate(default_model()),
        "generate_batch": batched(default_model(), tokens),
    }
    return {name: partial(rate, serve) for name, serve in made.items()}


def both_checkouts(options: argparse.Namespace) -> dict[str, Callable[[Requests], float]]:
    """Ours, and that of the other checkout."""
    arguments = [f"--{name}={getattr(options, name)}"
                 for name in ("trace", "requests", "rounds", "tokens", "threads")]  # fmt: skip
    line = other_process(options.against, *arguments)
    line()  # it is warm
    here = partial(rate, ours(default_model(), options.tokens))
    return {"ours": here, "there": lambda requests: float(line())}


def main() -> None:
    """Prints tokens/s of each, and the ratio of ours to the best of the others."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=256, help="tokens in a step at most")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--against", metavar="DIRECTORY", help="a checkout to compare with")
    parser.add_argument("--answers", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if not options.trace.is_file():
        print(f"# {options.trace}: skipped, no such file (--trace names another)")
        return
    arrivals = demand.read_trace(options.trace, options.requests)
    rounds = requests_of_rounds(arrivals)
    if options.answers:
        with contextlib.redirect_stdout(sys.stderr):
            serve = ours(default_model(), options.tokens)
        return answer(
            [("ours", lambda: serve)], lambda each: rate(each, next(rounds)), options.rounds
        )
    print(
        f"# {machine()['cpu']}, {len(arrivals)} requests, "
        f"{sum(a.prompt_tokens for a in arrivals)} prompt tokens, "
        f"{sum(a.output_tokens for a in arrivals)} to generate; "
        f"float32, {options.threads} threads, torch {torch.__version__}"
    )
    systems = both_checkouts(options) if options.against else all_systems(options.tokens)
    rates: dict[str, list[float]] = {name: [] for name in systems}
    for requests in itertools.islice(rounds, options.rounds):
        for name, rate_of in systems.items():
            rates[name].append(rate_of(requests))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    for name, values in rates.items():
        print(
            f"{name:15} {medians[name]:8.1f} tokens/s  "
            f"(min {min(values):.1f}, max {max(values):.1f})  "
            f"ours is {medians['ours'] / medians[name]:.2f}x"
        )
    best = max(medians[name] for name in systems if name != "ours")
    print(f"ours / best of the others: {medians['ours'] / best:.2f}x")


if __name__ == "__main__":
    main()
