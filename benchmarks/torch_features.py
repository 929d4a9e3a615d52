"""Prints what each use of torch's internals gains: `python benchmarks/torch_features.py`.

Each feature is switched off in its own processes, alternating with processes that have all: a cold
start with an empty store and compile cache, a second start from that store, and a decode step of
eight requests (one thread, mean of the two starts), and a call of a graph that computes next to
nothing, with its checks. Ratios are the median without the feature over
the median with it: above 1 the feature gains.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_COLUMNS = ("cold", "second", "step", "call")
_WAVES = 10


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--features", nargs="*", help="only these")
    parser.add_argument("--child", nargs=2, metavar=("WITHOUT", "STORE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(options.layers, *options.child)))
        return
    from graphs import torch_features

    names = options.features or [each.name for each in torch_features() if each.is_on]
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in ("", *names)}
    for _ in range(options.rounds):
        for name, rows in figures.items():
            rows.append(start(name, options.layers))
            print(f"without {name or 'none'}: {rows[-1]}", file=sys.stderr, flush=True)
    machine(options.layers)
    base = medians(figures[""])
    print(f"{'':16}" + "".join(f"{each:>10}" for each in _COLUMNS))
    print(f"{'all features':16}" + "".join(f"{base[each]:>10.4g}" for each in _COLUMNS) + "  s")
    for name in names:
        without = medians(figures[name])
        ratios = "".join(f"{without[each] / base[each]:>10.2f}" for each in _COLUMNS)
        print(f"{name:16}{ratios}")


def start(without: str, layers: int) -> dict[str, float]:
    """Run a cold and a second start without a feature; return seconds of each, and of a step."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
        command = [sys.executable, __file__, "--layers", str(layers)]
        rows = []
        for _ in range(2):
            child = [*command, "--child", without or "none", f"{folder}/store"]
            done = subprocess.run(
                child, env=environment, check=True, capture_output=True, text=True
            )
            rows.append(json.loads(done.stdout.splitlines()[-1]))
        means = {name: statistics.mean(row[name] for row in rows) for name in ("step", "call")}
        return {"cold": rows[0]["warmup"], "second": rows[1]["warmup"], **means}


def measure(layers: int, without: str, store: str) -> dict[str, float]:
    """Time a warmup and a decode step of eight requests in this process."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from compiled_attn.engine import Engine, EngineConfig, SamplingParams
    from graphs.torch_internals.catalog import FEATURES

    for feature in FEATURES:
        if feature.name == without:
            feature.switch_off("to measure what it gains")
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    sizes = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512}
    config = LlamaConfig(
        num_hidden_layers=layers, num_attention_heads=4, eos_token_id=None, **sizes
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    begin = time.perf_counter()
    engine = Engine(model, EngineConfig(context=64, max_seqs=8, max_graphs=4, store=Path(store)))
    engine.warmup()
    warmup = time.perf_counter() - begin
    seconds = []
    for wave in range(_WAVES):
        for number in range(8):
            engine.submit([1, 2 + wave, 3 + number], SamplingParams(max_new_tokens=50))
        while engine.has_work:
            begin = time.perf_counter()
            engine.step()
            seconds.append(time.perf_counter() - begin)
    return {"warmup": warmup, "step": statistics.median(seconds), "call": _seconds_of_call()}


def _seconds_of_call() -> float:
    from dispatch import Step, inputs_of, microseconds

    from graphs import Bucket, capture

    inputs = inputs_of(Bucket(tokens=24))
    graph = capture(Step(), inputs)
    return microseconds({"call": lambda: graph.run(*inputs)}, rounds=20)["call"] / 1e6


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
    """The median of each figure."""
    return {name: statistics.median(row[name] for row in rows) for name in _COLUMNS}


def machine(layers: int) -> None:
    """Print the line above the table."""
    import torch

    print(
        f"torch {torch.__version__}, float32, {layers} layers, {torch.get_num_threads()} threads, "
        f"{platform.processor() or platform.machine()}, {time.strftime('%Y-%m-%d')}"
    )


if __name__ == "__main__":
    main()
