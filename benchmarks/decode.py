"""Decode over a paged cache: the native kernel, its alternatives, and a read-only pass.

    python benchmarks/decode.py [--threads 1 2] [--dtypes float32 bfloat16] [--plot decode.png]
    python benchmarks/decode.py --in-turns --dtypes bfloat16 int8   # tokens over those of the first

32 query heads on 8 KV heads of 128, one query token a request, blocks anywhere in a pool of 1 GiB.
Cold: each step reads other blocks; hot: always the same few. One process, interleaved, medians.
Ratios are speeds: 1.0 of `read` is a pass that only reads the same blocks, the faster of two
levels (see native/limits.cpp).
FlexAttention's block mask is the block table (see native/flex.py), made outside of what is timed.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path

import torch
from native import baselines
from native.flex import flex
from native.limits import LEVELS, Limits
from native.plot import bars
from native.scene import DIM, KV_HEADS, Scene, Step
from native.timing import medians

from compiled_attn.cache import huge_pages
from graphs.installation import install_command

TOKENS = 32768  # of keys in a step


def alternatives(steps: list[Step]) -> dict[str, object]:
    """Baselines by name, each a function of a step."""
    step = steps[0]
    if step.scales:
        return {}
    gather, unified = (
        baselines.compiled(baselines.gather_sdpa),
        baselines.compiled(baselines.unified_unique),
    )
    requests, tokens = len(step.query), int(step.seq_lens[0])
    key, value = (
        torch.randn(requests, KV_HEADS, tokens, DIM).to(step.query.dtype) for _ in range(2)
    )

    def paged(function):
        return lambda s: function(s.query, s.key_cache, s.value_cache, s.block_table)

    return {
        "gather": paged(baselines.gather_sdpa),
        "gather inductor": paged(gather),
        "unified inductor": paged(unified),
        "flex": flex(steps),
        "contiguous": lambda s: baselines.contiguous_sdpa(s.query, key, value),
    }


def row(
    scene: Scene, context: int, limits: Limits, options: argparse.Namespace
) -> dict[str, float]:
    """Speeds relative to the read-only pass of one length of context."""
    requests = max(1, TOKENS // context)
    steps = scene.steps([1] * requests, [context] * requests, options.rounds + 1)
    if options.hot:
        steps = [steps[0]] * len(steps)
    torch._dynamo.reset()
    others = alternatives(steps)

    def read(level):
        return lambda i: limits.read(
            scene.key_cache, scene.value_cache, steps[i].block_table, level
        )

    runs = {f"read {level}": read(level) for level in LEVELS}
    runs["native"] = lambda i: baselines.native(steps[i])
    runs |= {name: lambda i, run=run: run(steps[i]) for name, run in others.items()}
    with torch.no_grad():
        found = medians(runs, options.rounds)
    found["read"] = min(found.pop(f"read {level}") for level in LEVELS)
    print_row(scene, context, requests, limits.threads, steps[0], found)
    return {name: found["read"] / seconds for name, seconds in found.items()}


def print_row(scene, context, requests, threads, step, found) -> None:
    """Speeds: of the pass in GB/s, of the kernel to the pass, of the kernel to each alternative."""
    dtype = str(scene.dtype).removeprefix("torch.")
    cells = [
        f"{found['read'] / found['native']:5.2f}",
        f"{step.kv_bytes / found['read'] / 1e9:6.1f}",
    ]
    cells += [f"{context * requests / found['native'] / 1e6:7.1f}"]
    cells += [
        f"{name} {found[name] / found['native']:.1f}x"
        for name in found
        if name not in ("read", "native")
    ]
    print(
        f"{dtype:>13} {scene.block_size:5} {context:7} {requests:4} {threads:7} ",
        *cells,
        flush=True,
    )


def rows_in_turns(options: argparse.Namespace) -> None:
    """Prints tokens a second of caches of each dtype, and those over the first: in turns, as the
    speed of a machine that others use changes from one minute to the next."""
    print(f"{'dtype':>13} block context reqs threads  Mtok/s  over {options.dtypes[0]}")
    for block_size in options.blocks:
        scenes = [
            Scene(
                getattr(torch, name),
                block_size,
                allocate=huge_pages.zeros,
                scaled=not options.unscaled,
            )
            for name in options.dtypes
        ]
        for context in options.contexts:
            requests = max(1, TOKENS // context)
            shape = [1] * requests, [context] * requests
            steps = [scene.steps(*shape, options.rounds + 1) for scene in scenes]
            runs = {
                name: lambda i, each=each: baselines.native(each[0 if options.hot else i])
                for name, each in zip(options.dtypes, steps, strict=True)
            }
            for threads in options.threads:
                torch.set_num_threads(threads)
                found = medians(runs, options.rounds)
                for name, seconds in found.items():
                    print(
                        f"{name:>13} {block_size:5} {context:7} {requests:4} {threads:7} "
                        f"{context * requests / seconds / 1e6:7.1f}  "
                        f"{found[options.dtypes[0]] / seconds:5.2f}",
                        flush=True,
                    )


def main() -> None:
    """Prints a row for each dtype, block size, context and number of threads."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument(
        "--dtypes", nargs="+", default=["float32", "bfloat16", "int8", "float8_e4m3fn"]
    )
    parser.add_argument("--blocks", type=int, nargs="+", default=[16, 128])
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--hot", action="store_true")
    parser.add_argument("--in-turns", action="store_true", help="only the kernel, over dtypes")
    parser.add_argument(
        "--unscaled", action="store_true", help="with --in-turns: fp8 without scales"
    )
    parser.add_argument("--plot", type=Path, help="write a PNG")
    options = parser.parse_args()
    if options.plot and options.in_turns:
        parser.error("expected --plot or --in-turns, got both: dtypes in turns are not drawn")
    if options.unscaled and not options.in_turns:
        parser.error("expected --in-turns with --unscaled")
    if options.plot and find_spec("matplotlib") is None:
        parser.error(f"expected matplotlib for --plot, found none: {install_command('report')}")
    print(f"# torch {torch.__version__}, {'hot' if options.hot else 'cold'} KV, pool on huge pages")
    if options.in_turns:
        return rows_in_turns(options)
    print(f"{'dtype':>13} block context reqs threads  of read  GB/s  Mtok/s  speed over")
    plotted: dict[str, dict[str, dict[str, float]]] = {}
    for name in options.dtypes:
        for block_size in options.blocks:
            scene = Scene(getattr(torch, name), block_size, allocate=huge_pages.zeros)
            for context in options.contexts:
                for threads in options.threads:
                    torch.set_num_threads(threads)
                    speeds = row(scene, context, Limits(threads), options)
                    label = f"block {block_size}\n{context}\n{threads} thread{'s' * (threads > 1)}"
                    plotted.setdefault(name, {})[label] = speeds
    if options.plot:
        bars(
            options.plot,
            "Decode, speed over a read-only pass of the same blocks (cold KV)",
            plotted,
        )


if __name__ == "__main__":
    main()
