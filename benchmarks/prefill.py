"""Prefill over a paged cache: the native kernel against the peak of the processor and torch's SDPA.

    python benchmarks/prefill.py [--threads 1 2] [--isas amx_bf16 avx512_bf16]

32 query heads on 8 KV heads of 128, one prompt, causal, blocks of 16, keys and values written
before; with ``--past`` the prompt's last tokens alone, a chunk. Operations that are counted: 4 *
heads * dim for each pair of a query and a key that it sees. Peak: multiply-adds in registers of
vectors (products of pairs for bfloat16), so that tiles may exceed it. SDPA has the keys and values
in a row, and for a chunk a mask. One process, interleaved, medians; hot KV, random data.
"""

from __future__ import annotations

import argparse

import torch
from native import baselines
from native.limits import Limits
from native.scene import Scene, Step
from native.timing import medians

from compiled_attn.ops import load


def main() -> None:
    """Prints a row for each dtype, length and number of threads."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 4096])
    parser.add_argument("--past", type=int, default=0, help="tokens that are in the cache before")
    parser.add_argument("--isas", nargs="+", default=[load(strict=True).isa])
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    print(f"# torch {torch.__version__}, hot KV, blocks of 16, past {options.past}")
    print(
        f"{'dtype':>9} length threads {'kernel':>12}  of peak  GFLOP/s  peak  over SDPA  over first"
    )
    for dtype in (torch.float32, torch.bfloat16):
        scene = Scene(dtype, 16, 2**26)
        for cache in (scene.key_cache, scene.value_cache):
            cache.normal_()
        for length in options.lengths:
            step = scene.steps([length], [length + options.past], 1)[0]
            sdpa = baselines.causal_sdpa(step)
            for threads in options.threads:
                torch.set_num_threads(threads)
                peak = Limits(threads).flops(dtype)
                runs = {isa: _native(step, isa) for isa in options.isas}
                with torch.no_grad():
                    found = medians({**runs, "sdpa": sdpa}, options.rounds)
                for isa in runs:
                    rate = step.flops / found[isa]
                    print(
                        f"{str(dtype)[6:]:>9} {length:6} {threads:7} {isa:>12}  {rate / peak:7.2f} "
                        f"{rate / 1e9:8.0f} {peak / 1e9:5.0f}  {found['sdpa'] / found[isa]:9.1f}  "
                        f"{found[options.isas[0]] / found[isa]:10.2f}",
                        flush=True,
                    )


def _native(step: Step, isa: str):
    ops = load(isa)
    return lambda _: ops.paged_attention(*step.arguments)


if __name__ == "__main__":
    main()
