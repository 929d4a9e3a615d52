"""Native replay of decode steps against the same graphs run by inductor's Python.

    python benchmarks/replay.py [--dtypes bfloat16 float32] [--requests 1 4 16] [--threads 1]
        [--weights plain] [--beside cpp_wrapper aoti]

One engine for each dtype, with random weights of SmolLM2-135M's architecture (30 layers); requests
have prompts of 32 tokens and generate as many, greedily. There is a graph for each number of
requests, and one for the prompts. In one process the same graphs are alternately replayed, and run
as inductor wrote them. Prints medians of milliseconds per step and the ratio. Weights are packed,
or plain, which are left to MKL and oneDNN.

`--beside` adds torch's public alternatives: inductor's C++ wrapper, and packages of AOTInductor,
each with its own engine that serves the same prompts in turn. Warmups are printed too.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from native.timing import medians
from peers.model import model_directory
from peers.table import heading

from compiled_attn.engine import Engine, EngineConfig, SamplingParams
from compiled_attn.engine.local import LocalExecutor
from compiled_attn.models import load_model
from graphs import explicit
from graphs.store.cache_folder import cache_folder

LENGTH = 32


class CppWrapper(LocalExecutor):
    """Runs steps by inductor's C++ wrapper, without replay."""

    def _backend_options(self, model: Any) -> dict[str, Any]:
        options = super()._backend_options(model)
        self._replays = None
        return {"options": {**options["options"], "cpp_wrapper": True}}


def ways_of(engine: Engine, count: int) -> dict[str, Callable[[int], object]]:
    """Both ways of serving `count` requests; each number gives other prompts."""
    replays = engine.executor._replays
    if replays is None or not replays.recorded:
        raise SystemExit(f"no replay here: {engine.report().kernel_notes}")
    replayed = serving(engine, count)

    def without(number: int) -> None:
        replays.enabled = False
        replayed(-1 - number)
        replays.enabled = True

    return {"inductor's Python": without, "replay": replayed}


def serving(engine: Engine, count: int) -> Callable[[int], object]:
    """Serves `count` requests with prompts that no call with another number has cached."""
    params = SamplingParams(max_new_tokens=LENGTH, ignore_eos=True)

    def serve(number: int) -> None:
        chance = torch.Generator().manual_seed(number + 10**6)
        prompts = torch.randint(100, 10_000, (count, LENGTH), generator=chance).tolist()
        for _ in engine.generate(prompts, params):
            pass

    return serve


def warm(engine: Engine, name: str) -> Engine:
    """Warms up an engine and prints the seconds."""
    start = time.perf_counter()
    engine.warmup()
    report = engine.report()
    print(
        f"  {name}: {report.graphs} graphs ({report.compiled_graphs} compiled) in "
        f"{time.perf_counter() - start:.1f} s",
        flush=True,
    )
    return engine


def main() -> None:
    """Prints a row for each dtype and number of requests."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--requests", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--weights", choices=("auto", "plain"), default="auto")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--beside", nargs="*", choices=("cpp_wrapper", "aoti"), default=())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    cache = Path(cache_folder("compiled-attn-peers"))
    cache.mkdir(parents=True, exist_ok=True)
    folder = model_directory(options.model, cache)
    print(heading(f"{folder.name}, {options.threads} threads"))
    for dtype in options.dtypes:
        most = max(options.requests)
        config = EngineConfig(
            max_seqs=most,
            context=512,
            weights=options.weights,
            buckets=explicit(
                ("tokens", "requests"),
                [*((count, count) for count in options.requests), (most * LENGTH, most)],
            ),
        )

        def model(dtype: str = dtype) -> Any:
            return load_model(folder, getattr(torch, dtype))

        print(f"{dtype}:")
        engine = warm(Engine(model(), config), "replay")
        print(f"  {engine.report().kernel_notes['replay']}")
        others = {}
        if "cpp_wrapper" in options.beside:
            others["cpp_wrapper"] = warm(Engine(CppWrapper(model(), config)), "cpp_wrapper")
        if "aoti" in options.beside:
            others["aoti"] = warm(Engine(model(), replace(config, backend="aoti")), "aoti")
        for count in options.requests:
            before = engine.report().steps
            ways = ways_of(engine, count)
            ways["replay"](0)
            steps = engine.report().steps - before
            ways |= {name: serving(other, count) for name, other in others.items()}
            times = {k: v / steps * 1e3 for k, v in medians(ways, options.rounds).items()}
            replayed = times["replay"]
            print(
                f"  {count:3d} requests: {replayed:6.2f} ms a step replayed; times of that:", end=""
            )
            rest = [f" {name} {times[name] / replayed:.2f}" for name in times if name != "replay"]
            print(",".join(rest), flush=True)


if __name__ == "__main__":
    main()
