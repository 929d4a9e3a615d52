"""Prefill over a paged cache: the native kernel against the peak of the processor and torch's SDPA.

    python benchmarks/prefill.py [--threads 1 2]

32 query heads on 8 KV heads of 128, one prompt, causal, blocks of 16, keys and values written
before. Operations that are counted: 4 * heads * dim for each pair of a query and a key that it
sees. Peak: multiply-adds in registers (products of pairs for bfloat16). One process, interleaved,
medians; hot KV.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from native import forms
from native.limits import Limits
from native.scene import DIM, KV_HEADS, Scene
from native.timing import medians


def main() -> None:
    """Prints a row for each dtype, length and number of threads."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 4096])
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    print(f"# torch {torch.__version__}, hot KV, blocks of 16")
    print(f"{'dtype':>9} length threads  of peak  GFLOP/s  peak  over SDPA on contiguous KV")
    for dtype in (torch.float32, torch.bfloat16):
        scene = Scene(dtype, 16, 2**26)
        for length in options.lengths:
            step = scene.steps([length], [length], 1)[0]
            query = step.query.transpose(0, 1).unsqueeze(0)
            key, value = (torch.randn(1, KV_HEADS, length, DIM).to(dtype) for _ in range(2))
            for threads in options.threads:
                torch.set_num_threads(threads)
                peak = Limits(threads).flops(dtype)

                def sdpa(_, query=query, key=key, value=value):
                    F.scaled_dot_product_attention(
                        query, key, value, is_causal=True, enable_gqa=True
                    )

                runs = {"native": lambda _, step=step: forms.native(step), "sdpa": sdpa}
                with torch.no_grad():
                    found = medians(runs, options.rounds)
                rate = step.flops / found["native"]
                print(
                    f"{str(dtype)[6:]:>9} {length:6} {threads:7}  {rate / peak:7.2f} "
                    f"{rate / 1e9:8.0f} "
                    f"{peak / 1e9:5.0f}  {found['sdpa'] / found['native']:.1f}x",
                    flush=True,
                )


if __name__ == "__main__":
    main()
