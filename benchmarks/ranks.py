"""Two ranks of a model against one process: a step by model size, and the warmup, cold and stored.

    python benchmarks/ranks.py [--sizes 256 512 1024] [--steps 16] [--parts steps warmups]
        [--rounds 3]

Steps: rank 0 serves the same requests alternately with two ranks (one thread each) and alone with
the whole model (two threads, while the other rank waits), in one run. The share of the collectives
is measured with as many collectives of the same shape in the same run; agreement is the exchange
between ranks before a step. Contexts: the same with long contexts, of which each rank stores half.
Warmup: one process each, with a fresh store and compile cache, then again with these, alternately,
`--rounds` times, each of some minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from compiled_attn.attention.by_rank import gathered
from compiled_attn.attention.metadata import KeyRanks
from compiled_attn.cli.store import stored_backend
from compiled_attn.contrib.context_parallel import ContextExecutor
from compiled_attn.engine import Engine, EngineConfig, SamplingParams
from compiled_attn.ranks import RankEngine, RankExecutor, Ranks, engine_on, join_ranks

LAYERS, REQUESTS, VOCAB, ROUNDS, CONTEXT = 4, 8, 2048, 3, 4096


def model_of(hidden: int) -> PreTrainedModel:
    heads = hidden // 64
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 4,
        num_hidden_layers=LAYERS,
        num_attention_heads=heads,
        num_key_value_heads=max(2, heads // 2),
        vocab_size=VOCAB,
        max_position_embeddings=CONTEXT + 128,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)


def config_of(context: int = 256, **settings: object) -> EngineConfig:
    blocks = 2 + REQUESTS * (context + 32) // 32
    return EngineConfig(128, REQUESTS, context=context, num_blocks=blocks, **settings)


class Pair:
    """The engine of the ranks, and on rank 0 one of the whole model with two threads."""

    def __init__(self, ranks: Ranks, hidden: int, context: int, *, divides: bool) -> None:
        self.ranks = ranks
        config = config_of(context)
        executor = ContextExecutor if divides else RankExecutor
        self.shared: RankEngine = engine_on(ranks, model_of(hidden), config, executor=executor)
        self.shared.warmup()
        if ranks.leads:
            torch.set_num_threads(2)  # a graph runs with the threads that it was captured with
            self.alone = Engine(model_of(hidden), config)
            self.alone.warmup()
            torch.set_num_threads(1)

    def times(self, serve: Callable[[Engine, int], Iterator[tuple[str, float]]]) -> dict:
        """Median seconds of each kind of step, as (ranks, one process), on rank 0."""
        if not self.ranks.leads:
            self.shared.follow()
            return {}
        found: dict[str, tuple[list[float], list[float]]] = {}
        for turn in range(ROUNDS):
            for place, (engine, threads) in enumerate(((self.shared, 1), (self.alone, 2))):
                torch.set_num_threads(threads)
                for kind, seconds in serve(engine, turn):
                    found.setdefault(kind, ([], []))[place].append(seconds)
                torch.set_num_threads(1)
        self.shared.dismiss()
        return {kind: [*map(median, pair)] for kind, pair in found.items()}


def short(engine: Engine, turn: int, count: int) -> Iterator[tuple[str, float]]:
    """Decodes of short requests, then a prompt as long as a step."""
    for number in range(REQUESTS):
        prompt = [(7 * number + 31 * turn + at) % VOCAB for at in range(16)]
        engine.submit(prompt, SamplingParams(count + 2, ignore_eos=True))
    engine.step()
    for _ in range(count):
        yield f"decode of {REQUESTS}", seconds_of_step(engine)
    finish(engine)
    engine.submit([(at + 13 * turn) % VOCAB for at in range(128)], SamplingParams(1))
    yield "prompt of 128", seconds_of_step(engine)
    finish(engine)


def long(engine: Engine, turn: int, count: int) -> Iterator[tuple[str, float]]:
    """A long prompt in chunks, of which the last four count, then decodes."""
    prompt = [(at * at + turn) % VOCAB for at in range(CONTEXT)]
    engine.submit(prompt, SamplingParams(count + 2, ignore_eos=True))
    chunks = [seconds_of_step(engine) for _ in range(CONTEXT // 128)]
    yield from (("chunk of 128", seconds) for seconds in chunks[-4:])
    for _ in range(count):
        yield "decode of 1", seconds_of_step(engine)
    finish(engine)


def finish(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def seconds_of_step(engine: Engine) -> float:
    begun = time.perf_counter()
    engine.step()
    return time.perf_counter() - begun


def weights(ranks: Ranks, hidden: int, count: int) -> None:
    """Steps under tensor parallelism."""
    found = Pair(ranks, hidden, 256, divides=False).times(lambda *turn: short(*turn, count))
    sums = {rows: seconds_of_sum(ranks, rows, hidden) for rows in (REQUESTS, 128)}
    agreement = seconds_of_agreement(ranks)
    for (kind, pair), rows in zip(found.items(), sums, strict=False):
        report(
            f"weights divided, hidden {hidden:4}", kind, pair, 2 * LAYERS * sums[rows], agreement
        )


def contexts(ranks: Ranks, hidden: int, count: int) -> None:
    """Steps under context parallelism."""
    pair = Pair(ranks, hidden, CONTEXT + 64, divides=True)
    found = pair.times(lambda *turn: long(*turn, count))
    exchanges = {rows: seconds_of_exchange(ranks, rows, hidden) for rows in (128, 1)}
    agreement = seconds_of_agreement(ranks)
    for (kind, pair_), rows in zip(found.items(), exchanges, strict=False):
        spent = LAYERS * exchanges[rows]
        report(f"context of {CONTEXT} divided, hidden {hidden:4}", kind, pair_, spent, agreement)


def report(what: str, kind: str, pair: list[float], collectives: float, agreement: float) -> None:
    ours, alone = pair
    print(
        f"{what}, {kind:13}: two ranks / one process of two threads {ours / alone:.2f} "
        f"({ours * 1e3:.2f} / {alone * 1e3:.2f} ms); collectives {collectives / ours:.0%}, "
        f"agreement {agreement / ours:.0%} of the ranks' step",
        flush=True,
    )


def seconds_of_sum(ranks: Ranks, rows: int, hidden: int) -> float:
    part, ops = torch.ones(rows, hidden), torch.ops._c10d_functional
    return seconds_of(lambda: ops.wait_tensor(ops.all_reduce(part, "sum", ranks.group)))


def seconds_of_exchange(ranks: Ranks, rows: int, hidden: int) -> float:
    out, lse = torch.ones(rows, hidden // 64, 64), torch.ones(rows, hidden // 64)
    return seconds_of(lambda: gathered(out, lse, KeyRanks(ranks.group, ranks.count)))


def seconds_of_agreement(ranks: Ranks) -> float:
    step = {"positions": np.arange(REQUESTS)}
    return seconds_of(lambda: (ranks.broadcast([]), ranks.compare(step)))


def seconds_of(call: Callable[[], object]) -> float:
    found = []
    for _ in range(100):
        begun = time.perf_counter()
        call()
        found.append(time.perf_counter() - begun)
    return median(found)


def warmup(ranks: Ranks | None, hidden: int, folder: Path, *, divides: bool) -> None:
    """Print the rank, the seconds of a warmup with a store, and the number of compiles."""
    with stored_backend("inductor", folder) as backend:
        model, config = model_of(hidden), config_of(backend=backend)
        if ranks is None:
            engine = Engine(model, config)
        else:
            executor = ContextExecutor if divides else RankExecutor
            engine = engine_on(ranks, model, config, executor=executor)
        begun = time.perf_counter()
        compiles = engine.warmup().compiles
        seconds = time.perf_counter() - begun
    line = json.dumps([0 if ranks is None else ranks.rank, seconds, compiles])
    os.write(1, f"{line}\n".encode())  # in one write, because ranks share stdout


def launch(*arguments: str, ranks: int = 2, folder: str | None = None) -> str:
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    # Spinning threads would take a core from the other processes.
    settings = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    if folder is not None:
        settings["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/inductor"
    run = subprocess.run(
        [*command, __file__, *arguments],
        env=settings,
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode:
        raise RuntimeError(f"expected {command} to work, got: {run.stderr[-2000:]}")
    return run.stdout


def warmups(hidden: int, rounds: int) -> None:
    seconds: dict[tuple[str, str], list[list[float]]] = {}
    kinds = (("one process", 1, "warmup"), ("two ranks, weights", 2, "warmup"),
             ("two ranks, contexts", 2, "warmup-contexts"))  # fmt: skip
    for _ in range(rounds):
        for name, ranks, case in kinds:
            with tempfile.TemporaryDirectory() as folder:
                for start in ("cold", "second"):
                    out = launch("--case", case, "--sizes", str(hidden), "--store", folder,
                                    ranks=ranks, folder=folder)  # fmt: skip
                    lines = sorted(json.loads(line) for line in out.splitlines() if line[0] == "[")
                    assert start == "cold" or not any(compiles for *_, compiles in lines)
                    found = [each for _, each, _ in lines]
                    seconds.setdefault((name, start), []).append(found)
                    line = ", ".join(f"{each:.1f} s" for each in found)
                    print(f"# {name}, {start}: {line}", flush=True)
    alone = median(each[0] for each in seconds["one process", "cold"])
    for name, *_ in kinds:
        cold, second = ([median(rank) for rank in zip(*seconds[name, start], strict=True)]
                        for start in ("cold", "second"))  # fmt: skip
        print(
            f"warmup, hidden {hidden}, {name:19}: cold {max(cold) / alone:.2f} of one process "
            f"({max(cold):.1f} s), second start "
            + ", ".join(f"{b / a:.1%} ({b:.1f} s)" for a, b in zip(cold, second, strict=True)),
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[256, 512, 1024])
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of warmups")
    parts = ["steps", "warmups"]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--store", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.case is None:
        for case in ("weights", "contexts") if "steps" in given.parts else ():
            for size in given.sizes:
                count = str(given.steps)
                print(launch("--case", case, "--sizes", str(size), "--steps", count), end="")
        if "warmups" in given.parts:
            warmups(given.sizes[0], given.rounds)
        return
    torch.set_num_threads(1)
    with join_ranks() as ranks:
        if given.case.startswith("warmup"):
            warmup(ranks, given.sizes[0], given.store, divides=given.case == "warmup-contexts")
            return
        assert ranks is not None
        steps = {"weights": weights, "contexts": contexts}[given.case]
        steps(ranks, given.sizes[0], given.steps)


if __name__ == "__main__":
    main()
