"""What launches of the Triton op read, write and compute, by the model of their traffic.

    python benchmarks/gpu_traffic.py [--processors 132] [--bandwidth 3.35] [--peak 989]

Needs no GPU. 32 query heads on 8 KV heads of 128, bfloat16 queries, blocks of 16, the plan of the
chooser for sm_90. ``MB``: requested by the programs; ``over``: over the floor. Times are bounds: of
the floor at the bandwidth and at 0.85 of it, and of the operations at the peak. Prompts read the
same keys from L2, so their requests are no time of device memory. ``waste``: operations of tiles
over those needed.
"""

from __future__ import annotations

import argparse
from typing import Any

from accelerator.traffic import Rows, attend_traffic, floor_of

from compiled_attn.ops.triton.tiles import Chip, Problem, plan

CELLS = {  # requests, queries, keys of each
    "decode 1 x 8k": (1, 1, 8192),
    "decode 16 x 1k": (16, 1, 1024),
    "decode 64 x 1k": (64, 1, 1024),
    "decode 256 x 1k": (256, 1, 1024),
    "prefill 2k": (1, 2048, 2048),
    "prefill 8k": (1, 8192, 8192),
    "prefill 32k": (1, 32768, 32768),
    "prefill 2k on 30k": (1, 2048, 32768),
}


def row(cell: str, codes: str, options: argparse.Namespace) -> dict[str, Any]:
    """The figures of a cell; codes: of the cache."""
    requests, queries, keys = CELLS[cell]
    problem = Problem(requests * queries, requests, 8, 4, 128, 128, keys, 16, "bfloat16", codes)
    chosen = plan(problem, Chip(options.processors, is_hopper=True))
    rows = [Rows(queries, keys)] * requests
    model, floor = attend_traffic(problem, chosen, rows), floor_of(problem, rows)
    tile = chosen.tile
    return {
        "cell": cell,
        "cache": "bfloat16" if codes == "none" else codes,
        "plan": f"{tile.rows}x{tile.keys}, {tile.warps}w, {tile.stages}s, /{chosen.splits}",
        "bytes": model.total,
        "floor": floor.total,
        "parts": model.read["parts"] + model.written["parts"],
        "us": floor.total / options.bandwidth / 1e6,
        "us_at_goal": floor.total / options.bandwidth / 0.85e6,
        "requested_us": model.total / options.bandwidth / 1e6,
        "flops": floor.flops,
        "waste": model.flops / floor.flops,
        "us_of_flops": floor.flops / options.peak / 1e6,
    }


def main() -> None:
    """Prints a row for each cell and cache."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processors", type=int, default=132)
    parser.add_argument("--bandwidth", type=float, default=3.35, help="TB/s")
    parser.add_argument("--peak", type=float, default=989.0, help="TFLOP/s")
    options = parser.parse_args()
    print(
        f"{'cell':18}{'cache':10}{'plan':20}{'MB':>9}{'floor':>9}{'over':>7}{'parts':>7}"
        f"{'us':>8}{'at 0.85':>9}{'GFLOP':>9}{'waste':>7}{'us':>8}"
    )
    for cell in CELLS:
        for codes in ("none", "e4m3"):
            each = row(cell, codes, options)
            print(
                f"{cell:18}{each['cache']:10}{each['plan']:20}{each['bytes'] / 1e6:9.2f}"
                f"{each['floor'] / 1e6:9.2f}{each['bytes'] / each['floor']:7.3f}"
                f"{each['parts'] / 1e6:7.2f}{each['us']:8.1f}{each['us_at_goal']:9.1f}"
                f"{each['flops'] / 1e9:9.1f}{each['waste']:7.2f}{each['us_of_flops']:8.1f}"
            )


if __name__ == "__main__":
    main()
