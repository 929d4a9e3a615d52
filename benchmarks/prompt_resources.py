"""Registers, memory and instructions of the kernel for prompts, compiled for absent devices.

    python benchmarks/prompt_resources.py [--targets sm_90 ...] [--cases NAME ...] [--json]

Needs the extra `triton`, and no GPU.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from accelerator.resources import machine_code, resources
from triton_resources import F16, F32, Case, call_of

from compiled_attn.ops.triton.prompt import prompt_kernel
from compiled_attn.ops.triton.prompt_launch import launches
from compiled_attn.ops.triton.tiles import Tile

WIDE, NARROW = Tile(128, 128, 8, 2), Tile(128, 64, 8, 2)
CASES: dict[str, tuple[Case, Tile]] = {
    "D 64, page 128": (Case(64, page=128), WIDE),
    "D 128, page 128": (Case(page=128), WIDE),
    "D 128, page 64": (Case(page=64), WIDE),
    "D 128, page 16": (Case(page=16), WIDE),
    "D 128, group 1, float16": (Case(page=128, group=1, dtype=F16), WIDE),
    "D 256, page 64": (Case(256, page=64), Tile(128, 64, 8, 2)),
    "D 64, page 64, 99 KB": (Case(64, page=64), NARROW),
    "D 128, page 64, 99 KB": (Case(page=64), NARROW),
}
STEPS = {
    "matrix": "HGMMA|UTC[A-Z]*MMA|HMMA",  # products on tensor cores
    "bulk": "UTMALDG",  # copies of tiles
    "limits": "USETMAXREG",  # registers passed on between specialised warps
    "stores": "STL",  # to local memory: spilled registers
}


def rows(targets: list[str], cases: list[str]) -> Iterator[dict[str, Any]]:
    """Each kernel of each case on each target."""
    for name in cases:
        case, tile = CASES[name]
        call = call_of(case, 4096, 8)
        results = call.query.new_empty(call.query.shape), call.query.new_empty(4096, 32, dtype=F32)
        pipelined = launches(call, tile, results, specialized=False, widen=False)
        special = launches(call, tile, results, specialized=True, widen=False)
        for target in targets:
            named = [("pipelined", pipelined[0])]
            if target == "sm_90" and case.dim <= 128:
                named += [("specialized", special[0]), ("repair", special[1])]
            for kernel, launch in named:
                code = machine_code(prompt_kernel, launch, target)
                found = {
                    each: len(re.findall(rf"\b(?:{step})\b", code)) for each, step in STEPS.items()
                }
                used = asdict(resources(prompt_kernel, launch, target))
                yield {"case": name, "kernel": kernel, "target": target} | used | found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--targets", nargs="+", default=["sm_90", "sm_100"])
    parser.add_argument("--cases", nargs="+", default=[*CASES], choices=[*CASES])
    parser.add_argument("--json", action="store_true", help="a line of JSON each")
    arguments = parser.parse_args()
    line = (
        "{case:25}{kernel:13}{target:>7}{registers:>5}{spilled:>6}{shared:>8}{matrix:>5}{bulk:>4}"
        "{limits:>4}  {tensor_cores}"
    )
    for row in rows(arguments.targets, arguments.cases):
        print(json.dumps(row) if arguments.json else line.format(**row), flush=True)


if __name__ == "__main__":
    main()
