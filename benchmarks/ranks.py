"""Two ranks of a model against one process: a step by model size, and the warmup, cold and stored.

    python benchmarks/ranks.py [--sizes 256 512 1024] [--steps 12] [--skip-warmup]

Steps: rank 0 serves the same requests in turns with its share of the model (two ranks of a thread
each) and with all of it (two threads, while the other rank waits), in one run. The share of the
collectives is that of as many sums of the same shape, timed on their own in the same run; that of
the agreement is what ranks tell each other before a step. Warmup: a fresh store each, then again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.llama import LlamaConfig

from compiled_attn.cli.store import stored_backend
from compiled_attn.engine import Engine, EngineConfig, SamplingParams
from compiled_attn.ranks import Ranks, engine_on, joined_ranks

LAYERS, REQUESTS = 4, 8


def model_of(hidden: int) -> PreTrainedModel:
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 4,
        num_hidden_layers=LAYERS,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        vocab_size=2048,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)


def config_of(backend: object) -> EngineConfig:
    return EngineConfig(
        128, REQUESTS, context=256, num_blocks=256, max_graphs=4, backend=backend, kernel="native"
    )


def steps(ranks: Ranks, hidden: int, count: int) -> None:
    """The median step of decodes, and of a prompt, in turns."""
    shared = engine_on(ranks, model_of(hidden), config_of("eager"))
    shared.warmup()
    if ranks.leads:
        whole = Engine(model_of(hidden), config_of("eager"))
        whole.warmup()
        times: dict[str, list[float]] = {}
        for _ in range(3):
            for name, engine, threads in (("ranks", shared, 1), ("one", whole, 2)):
                torch.set_num_threads(threads)
                for kind, seconds in served(engine, count):
                    times.setdefault(f"{name} {kind}", []).append(seconds)
        torch.set_num_threads(1)
        shared.dismiss()
    else:
        shared.follow()
    sums = {rows: seconds_of_sum(rows, hidden) for rows in (REQUESTS, 128)}
    agreement = seconds_of(lambda: (ranks.tell([]), ranks.agree([("positions", [*range(8)])])))
    if ranks.leads:
        for kind, rows in (("decode", REQUESTS), ("prompt", 128)):
            ours, alone = median(times[f"ranks {kind}"]), median(times[f"one {kind}"])
            say(
                f"hidden {hidden:5}, {kind} of {rows:3} tokens: two ranks / one of two threads "
                f"{ours / alone:.2f} ({ours * 1e3:.1f} / {alone * 1e3:.1f} ms), collectives "
                f"{2 * LAYERS * sums[rows] / ours:.0%}, agreement {agreement / ours:.0%} of a step"
            )


def served(engine: Engine, count: int) -> list[tuple[str, float]]:
    for each in range(REQUESTS):
        prompt = [(7 * each + at) % 2000 for at in range(16)]
        engine.submit(prompt, SamplingParams(count + 2, ignore_eos=True), salt=time.time_ns())
    engine.step()
    found = []
    for _ in range(count - 2):
        begun = time.perf_counter()
        engine.step()
        found.append(("decode", time.perf_counter() - begun))
    while engine.has_work:
        engine.step()
    engine.submit([*range(128)], SamplingParams(1), salt=time.time_ns())
    begun = time.perf_counter()
    engine.step()
    return [*found, ("prompt", time.perf_counter() - begun)]


def seconds_of_sum(rows: int, hidden: int) -> float:
    part = torch.ones(rows, hidden)
    return seconds_of(lambda: dist.all_reduce(part))


def seconds_of(call: Callable[[], object]) -> float:
    found = []
    for _ in range(30):
        begun = time.perf_counter()
        call()
        found.append(time.perf_counter() - begun)
    return median(found)


def warmup(ranks: Ranks | None, folder: str) -> None:
    """The seconds of a warmup, with a store in the folder."""
    with stored_backend("inductor", Path(folder)) as backend:
        model, config = model_of(256), config_of(backend)
        engine = Engine(model, config) if ranks is None else engine_on(ranks, model, config)
        begun = time.perf_counter()
        engine.warmup()
        rank = 0 if ranks is None else ranks.rank
        say(json.dumps([rank, time.perf_counter() - begun]))


def say(line: str) -> None:
    os.write(1, f"{line}\n".encode())  # in one piece, as ranks share it


def launched(*arguments: str, ranks: int = 2) -> str:
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [__file__, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def warmups() -> None:
    seconds = {}
    for ranks in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            for start in ("cold", "second"):
                lines = launched("--rank-of", "warmup", folder, ranks=ranks).splitlines()
                found = [json.loads(line) for line in lines if line.startswith("[")]
                seconds[ranks, start] = [each for _, each in sorted(found)]
    one, two = seconds[1, "cold"][0], max(seconds[2, "cold"])
    print(f"warmup of two ranks / of one: {two / one:.2f} ({two:.1f} / {one:.1f} s)")
    for ranks in (1, 2):
        pairs = zip(seconds[ranks, "second"], seconds[ranks, "cold"], strict=True)
        ratios = ", ".join(f"{second / cold:.1%}" for second, cold in pairs)
        print(f"second start / cold, {ranks} rank(s): {ratios}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[256, 512, 1024])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--skip-warmup", action="store_true")
    parser.add_argument("--rank-of", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank_of is None:
        for size in given.sizes:
            print(launched("--rank-of", "steps", str(size), "--steps", str(given.steps)), end="")
        if not given.skip_warmup:
            warmups()
        return
    torch.set_num_threads(1)
    case, argument = given.rank_of
    with joined_ranks() as ranks:
        if case == "warmup":
            warmup(ranks, argument)
        else:
            assert ranks is not None
            steps(ranks, int(argument), given.steps)


if __name__ == "__main__":
    main()
