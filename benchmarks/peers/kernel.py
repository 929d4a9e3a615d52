"""Attention alone, in one process: our kernel, vLLM's on the CPU, torch's SDPA.

    PYTHONPATH=benchmarks:. python -m peers.kernel [--threads 1 2] [--dtypes bfloat16 float32]

Runs in the environment of vLLM that `python -m peers` makes, and makes it; where that fails, vLLM
is left out with the reason. 32 query heads on 8 KV heads of 128, blocks of 128 on huge pages.
Decode: a query token a request, each step reads other blocks of a pool of 1 GiB (cold); shares are
of a pass that only reads the same blocks. Prefill, a chunk after a past, and 16 decodes beside two
chunks: operations a second of causal attention; SDPA has keys and values in a row, for a chunk a
mask. vLLM plans a step outside of what is timed, ours inside. Interleaved, medians; what vLLM
computes is first compared with ours.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import torch
from native import baselines
from native.limits import LEVELS, Limits
from native.scene import Scene, Step
from native.timing import medians

from compiled_attn.cache import huge_pages
from compiled_attn.ops import load
from graphs.store.cache_folder import cache_folder
from peers import table
from peers.servers import PeerGone
from peers.systems import BENCHMARKS, VLLM
from peers.vllm_attention import VllmAttention

BLOCK = 128
DECODES = ((1, 512), (1, 2048), (4, 8192), (16, 2048), (32, 512))
PROMPTS = ((512, 512), (2048, 2048), (4096, 4096), (256, 4352))
"""Query tokens, and those that they attend to."""

MIXED = [1] * 16 + [256, 256], [2048] * 16 + [1280, 256]

Run = Callable[[int], object]


def decode(scene: Scene, theirs: VllmAttention | None, threads: int, rounds: int) -> Iterator[str]:
    """Speed over vLLM's, and of both over the read-only pass."""
    limits = Limits(threads)
    for requests, context in DECODES:
        steps = scene.steps([1] * requests, [context] * requests, rounds + 1)
        runs = _kernels(steps, theirs)
        for level in LEVELS:
            runs[f"read {level}"] = lambda i, steps=steps, level=level: limits.read(
                scene.key_cache, scene.value_cache, steps[i].block_table, level
            )
        found = medians(runs, rounds)
        read = min(found[f"read {level}"] for level in LEVELS)
        shares = "".join(f"{read / found[name]:9.2f}" for name in ("ours", "vllm") if name in found)
        yield f"decode {requests:3} x {context:<8}{_over(found, 'vllm')}{shares}"


def prefill(scene: Scene, theirs: VllmAttention | None, rounds: int) -> Iterator[str]:
    """Speed over vLLM's and over SDPA, and GFLOP/s of all."""
    cells = {f"{new} of {total}": ([new], [total]) for new, total in PROMPTS} | {"mixed": MIXED}
    for name, (queries, lengths) in cells.items():
        steps = scene.steps(queries, lengths, 1) * (rounds + 1)
        runs = _kernels(steps, theirs)
        if len(queries) == 1:
            runs["sdpa"] = baselines.causal_sdpa(steps[0])
        found = medians(runs, rounds)
        rates = (
            f"{steps[0].flops / found[each] / 1e9:9.0f}" if each in found else f"{'-':>9}"
            for each in ("ours", "vllm", "sdpa")
        )
        yield f"{name:16}{_over(found, 'vllm')}{_over(found, 'sdpa')}{''.join(rates)}"


def _kernels(steps: list[Step], theirs: VllmAttention | None) -> dict[str, Run]:
    runs: dict[str, Run] = {"ours": lambda i: baselines.native(steps[i])}
    if theirs is not None:
        runs["vllm"] = run = theirs.form(steps)
        torch.testing.assert_close(run(0), baselines.native(steps[0]), atol=2e-2, rtol=2e-2)
    return runs


def _over(found: dict[str, float], other: str) -> str:
    return f"{found[other] / found['ours']:9.2f}" if other in found else f"{'-':>9}"


def main() -> None:
    """Prints a row for each dtype, number of threads and cell."""
    parser = argparse.ArgumentParser(
        prog="python -m peers.kernel", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--torch-index", metavar="URL", help="has CPU builds of torch, for pip")
    parser.add_argument(
        "--cache", type=Path, metavar="DIR", default=cache_folder("compiled-attn-peers")
    )
    options = parser.parse_args()
    has_vllm = _in_its_environment(options.cache, options.torch_index)
    for name in options.dtypes:
        scene = Scene(getattr(torch, name), BLOCK, allocate=huge_pages.zeros)
        theirs = VllmAttention(scene) if has_vllm else None
        for threads in options.threads:
            torch.set_num_threads(threads)
            isas = f"ours {load(strict=True).isa}, vLLM {theirs.isa if theirs else '-'}"
            print(table.heading(f"{name}, threads: {threads}, {isas}"))
            print(f"{'':16}{'over vLLM':>11}{'share of read: ours, vLLM':>28}")
            for line in decode(scene, theirs, threads, options.rounds):
                print(line, flush=True)
            print(f"{'':16}{'over vLLM, SDPA':>18}{'GFLOP/s: ours, vLLM, SDPA':>27}")
            for line in prefill(scene, theirs, options.rounds):
                print(line, flush=True)


def _in_its_environment(cache: Path, torch_index: str | None) -> bool:
    """Goes on in vLLM's environment, in place of this process; False where there is none."""
    if find_spec("vllm") is not None:
        return True
    assert VLLM.environment is not None
    try:
        python = VLLM.environment.python(cache.expanduser().resolve(), torch_index)
    except PeerGone as error:
        print(f"# vllm is left out: {error}")
        return False
    paths = os.pathsep.join((str(BENCHMARKS), str(BENCHMARKS.parent)))
    command = [str(python), "-m", "peers.kernel", *sys.argv[1:]]
    os.execve(python, command, {**os.environ, "PYTHONPATH": paths})


if __name__ == "__main__":
    with torch.no_grad():
        main()
