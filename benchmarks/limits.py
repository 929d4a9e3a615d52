"""What the machine can do at best: reading the blocks of a table, and multiply-adds of caches.

    python benchmarks/limits.py [--threads 1 2] [--blocks 16 128]   # --blocks alone: no reading

Blocks of keys and of values (8 heads of 128, float32) anywhere in a pool of 1 GiB, on plain and on
huge pages; against the same pool read from end to end; the faster of two levels each (see
native/limits.cpp). Cold; medians of interleaved rounds.
"""

from __future__ import annotations

import argparse

import torch
from native.limits import LEVELS, Limits
from native.scene import Scene
from native.timing import medians

from compiled_attn.cache import huge_pages


def main() -> None:
    """Prints bandwidths and peaks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--blocks", type=int, nargs="*", default=[1, 4, 16, 32, 128])
    options = parser.parse_args()
    if options.blocks:
        print("block bytes  pages  threads  GB/s  of linear")
    for block_size in options.blocks:
        for pages, allocate in (("plain", torch.zeros), ("huge", huge_pages.zeros)):
            scene = Scene(torch.float32, block_size, allocate=allocate)
            blocks = len(scene.key_cache)
            shuffled = torch.randperm(blocks, dtype=torch.int32)[: blocks // 2]
            linear = torch.arange(blocks // 2, dtype=torch.int32)
            size = 2 * len(shuffled) * scene.key_cache[0].numel() * 4
            for threads in options.threads:
                limits = Limits(threads)
                runs = {
                    f"{name} {level}": lambda _, t=table, s=scene, m=limits, level=level: m.read(
                        s.key_cache, s.value_cache, t, level
                    )
                    for name, table in (("linear", linear), ("shuffled", shuffled))
                    for level in LEVELS
                }
                found = medians(runs, options.rounds)
                in_line, anywhere = (
                    min(found[f"{name} {level}"] for level in LEVELS)
                    for name in ("linear", "shuffled")
                )
                print(
                    f"{block_size * 4096:11} {pages:>6} {threads:8} "
                    f"{size / anywhere / 1e9:5.1f} "
                    f"{in_line / anywhere:10.2f}",
                    flush=True,
                )
    for threads in options.threads:
        for dtype in (torch.float32, torch.bfloat16, torch.int8):
            found = sorted(Limits(threads).flops(dtype) / 1e9 for _ in range(options.rounds))
            print(
                f"{threads} threads, {dtype}: {found[len(found) // 2]:.0f} Gop/s of multiply-adds, "
                f"{found[0]:.0f} to {found[-1]:.0f}"
            )


if __name__ == "__main__":
    main()
