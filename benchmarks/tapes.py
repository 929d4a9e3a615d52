"""Steps that are played from tapes beside the same graphs run by inductor's own Python.

    python benchmarks/tapes.py [--dtypes bfloat16 float32] [--requests 1 4 16] [--threads 1]
        [--weights plain]

One engine for each dtype, with drawn weights of SmolLM2-135M's architecture (30 layers); requests
have prompts of 32 tokens and generate as many, greedily. In turns, in one process, the same graphs
are played, and run as inductor wrote them. Printed: milliseconds of a step both ways, medians, and
the ratio. Weights as the engine packs them, or plain, which are left to MKL and oneDNN.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from native.timing import medians
from peers.model import model_directory
from peers.table import heading

from compiled_attn.engine import Engine, EngineConfig, SamplingParams
from compiled_attn.models import load_model
from graphs.store.cache_folder import cache_folder

LENGTH = 32


def ways_of(engine: Engine, count: int) -> dict[str, Callable[[int], object]]:
    """Both ways of serving so many requests; a number gives them prompts of their own."""
    tapes = engine.executor._tapes
    if tapes is None or not tapes.made:
        raise SystemExit(f"no tapes here: {engine.report().kernel_notes}")
    params = SamplingParams(max_new_tokens=LENGTH, ignore_eos=True)

    def serve(number: int) -> None:  # of which no other call has cached prompts
        chance = torch.Generator().manual_seed(number + 10**6)
        prompts = torch.randint(100, 10_000, (count, LENGTH), generator=chance).tolist()
        for _ in engine.generate(prompts, params):
            pass

    def serve_without(number: int) -> None:
        tapes.are_played = False
        serve(-1 - number)
        tapes.are_played = True

    return {"inductor's Python": serve_without, "tapes": serve}


def main() -> None:
    """Prints a row for each dtype and number of requests."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--requests", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--weights", choices=("auto", "plain"), default="auto")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    cache = Path(cache_folder("compiled-attn-peers"))
    cache.mkdir(parents=True, exist_ok=True)
    folder = model_directory(options.model, cache)
    print(heading(f"{folder.name}, {options.threads} threads"))
    for dtype in options.dtypes:
        model = load_model(folder, getattr(torch, dtype))
        config = EngineConfig(max_seqs=max(options.requests), context=512, weights=options.weights)
        engine = Engine(model, config)
        engine.warmup()
        print(f"{dtype}: {engine.report().kernel_notes['tapes']}")
        for count in options.requests:
            before = engine.report().steps
            ways = ways_of(engine, count)
            ways["tapes"](0)
            steps = engine.report().steps - before
            times = medians(ways, options.rounds)
            by_python, played = (times[name] / steps * 1e3 for name in ways)
            print(
                f"  {count:3d} requests: {by_python:6.2f} ms a step by inductor's Python, "
                f"{played:6.2f} played: {by_python / played:.2f}x, {by_python - played:.2f} ms less"
            )


if __name__ == "__main__":
    main()
