"""Decodes and prefill chunks in one call, against the same requests in calls of their own.

    python benchmarks/mixed.py [--threads 1 2]

32 query heads on 8 KV heads of 128; 16 decodes of 2048 tokens and two chunks of 256 tokens that
follow 1024 and 0 others. 1.0: the mixed call takes as long as its parts together. One process,
interleaved, medians; cold KV.
"""

from __future__ import annotations

import argparse

import torch
from native import baselines
from native.scene import Scene
from native.timing import medians

from compiled_attn.cache import huge_pages

DECODES = ([1] * 16, [2048] * 16)
CHUNKS = ([256, 256], [1280, 256])


def main() -> None:
    """Prints a row for each dtype and number of threads."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    print(f"# torch {torch.__version__}, cold KV, blocks of 16, pool on huge pages")
    print(f"{'dtype':>9} threads  speed of the mixed call over its parts")
    for dtype in (torch.float32, torch.bfloat16):
        scene = Scene(dtype, 16, allocate=huge_pages.zeros)
        count = options.rounds + 1
        mixed = scene.steps(DECODES[0] + CHUNKS[0], DECODES[1] + CHUNKS[1], count)
        decodes, chunks = scene.steps(*DECODES, count), scene.steps(*CHUNKS, count)
        for threads in options.threads:
            torch.set_num_threads(threads)
            with torch.no_grad():
                found = medians(
                    {
                        "mixed": lambda i, steps=mixed: baselines.native(steps[i]),
                        "decodes": lambda i, steps=decodes: baselines.native(steps[i]),
                        "chunks": lambda i, steps=chunks: baselines.native(steps[i]),
                    },
                    options.rounds,
                )
            ratio = (found["decodes"] + found["chunks"]) / found["mixed"]
            print(f"{str(dtype)[6:]:>9} {threads:7}  {ratio:.2f}", flush=True)


if __name__ == "__main__":
    main()
