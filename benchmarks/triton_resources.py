"""Registers, memory and instructions of the Triton op, compiled for devices that are not at hand.

    python benchmarks/triton_resources.py [--targets sm_90 ...] [--cases NAME ...]
                                          [--kernels decode ...] [--json]

Needs the extra `triton`, and no GPU. The table is kept in benchmarks/results/triton_resources.txt.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from accelerator.resources import TARGETS, resources

from compiled_attn.attention.scoring import Scoring
from compiled_attn.ops.call import NewTokens, PagedCall
from compiled_attn.ops.triton.arguments import (
    Launch,
    attend_launch,
    merge_launch,
    problem_of,
    write_launch,
)
from compiled_attn.ops.triton.attend import attend_kernel
from compiled_attn.ops.triton.merge import merge_kernel
from compiled_attn.ops.triton.tiles import Chip, Plan, plan
from compiled_attn.ops.triton.write import write_kernel

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
HAVE_FP8 = ("sm_89", "sm_90", "sm_100", "sm_120")


@dataclass(frozen=True)
class Case:
    """A bucket of a model: sizes, dtypes, and what its attention has."""

    dim: int = 128
    group: int = 4
    dtype: torch.dtype = BF16
    cache: torch.dtype | None = None
    page: int = 16
    value_dim: int | None = None
    kv_heads: int = 8
    everything: bool = False
    sinks: bool = False


CASES = {
    "D 128": Case(),
    "D 64": Case(64),
    "D 128, e4m3": Case(cache=torch.float8_e4m3fn),
    "D 256": Case(256),
    "D 576, Dv 512": Case(576, value_dim=512, kv_heads=1, group=16),
    "D 128, float32": Case(dtype=F32),
    "D 64, float32": Case(64, dtype=F32),
    "D 256, float32": Case(256, dtype=F32),
    "D 576, Dv 512, float32": Case(576, dtype=F32, value_dim=512, kv_heads=1, group=16),
    "D 64, int8": Case(64, cache=torch.int8),
    "D 64, e4m3": Case(64, cache=torch.float8_e4m3fn),
    "D 256, int8": Case(256, cache=torch.int8),
    "D 256, e4m3": Case(256, cache=torch.float8_e4m3fn),
    "D 576, Dv 512, e4m3": Case(
        576, cache=torch.float8_e4m3fn, value_dim=512, kv_heads=1, group=16
    ),
    "D 576, Dv 512, group 32": Case(576, value_dim=512, kv_heads=1, group=32),
    "D 1024": Case(1024),
    "D 1024, e4m3": Case(1024, cache=torch.float8_e4m3fn),
    "D 1024, int8": Case(1024, cache=torch.int8),
    "D 576, Dv 512, group 128": Case(576, value_dim=512, kv_heads=1, group=128),
    "D 128, window, cap, ALiBi, sinks": Case(everything=True),
    "D 128, int8, float16, page 128": Case(dtype=F16, cache=torch.int8, page=128),
    "D 64, sinks": Case(64, sinks=True),
    "D 192, Dv 128": Case(192, value_dim=128, group=1),
}
STEPS = {"decode": (8, 8), "prefill": (4096, 8)}


def call_of(case: Case, tokens: int, requests: int) -> PagedCall:
    """A call without memory."""

    def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    heads, stored = case.kv_heads * case.group, case.cache or case.dtype
    cells, value_dim = (1024, case.page, case.kv_heads), case.value_dim or case.dim
    each = empty(heads, dtype=F32) if case.everything else None
    options = {}
    if case.everything:
        options = {"window": 4096, "softcap": 50.0, "alibi_slopes": each, "sinks": each}
    if case.sinks:
        options = {"sinks": empty(heads, dtype=F32)}
    scale = empty(*cells, dtype=F32) if case.cache else None
    return PagedCall(
        empty(tokens, heads, case.dim, dtype=case.dtype),
        empty(*cells, case.dim, dtype=stored),
        empty(*cells, value_dim, dtype=stored),
        empty(requests, 8192 // case.page, dtype=torch.int32),
        empty(requests, dtype=torch.int32),
        empty(requests + 1, dtype=torch.int32),
        Scoring(0.1, **options),
        True,
        scale,
        scale,
        NewTokens(
            empty(tokens, case.kv_heads, case.dim, dtype=case.dtype),
            empty(tokens, case.kv_heads, value_dim, dtype=case.dtype),
            empty(tokens, dtype=torch.int64),
        ),
    )


def kernels_of(case: Case, target: str) -> Iterator[tuple[str, Plan, Any, Launch]]:
    """Each kernel of a case with the plan of the chooser: name, plan, kernel, launch."""
    chip, has_fp8 = Chip(132, is_hopper=target == "sm_90"), target in HAVE_FP8
    for step, sizes in STEPS.items():
        call = call_of(case, *sizes)
        assert call.new is not None
        chosen = plan(problem_of(call), chip)
        out = call.query.new_empty(*call.query.shape[:2], call.value_cache.shape[3])
        lse, parts = out.new_empty(out.shape[:2], dtype=F32), out.new_empty(
            chosen.splits, *out.shape, dtype=F32
        )  # fmt: skip
        if chosen.splits == 1:
            yield step, chosen, attend_kernel, attend_launch(
                call, chosen, (out, lse, None), widen=False, has_fp8=has_fp8
            )  # fmt: skip
            continue
        tops = parts[..., 0]
        yield step, chosen, attend_kernel, attend_launch(
            call, chosen, (parts, tops, tops), widen=False, has_fp8=has_fp8
        )  # fmt: skip
        merged = merge_launch(call, (parts, tops, tops), out, lse)
        yield f"merge of {step}", chosen, merge_kernel, merged
    yield "write", chosen, write_kernel, write_launch(call, call.new)


def rows(
    targets: list[str], cases: list[str], kernels: list[str] | None = None
) -> Iterator[dict[str, Any]]:
    """The resources of the kernels of these names; None: of all."""
    for name in cases:
        for target in targets:
            for step, (tile, splits, _), kernel, launch in kernels_of(CASES[name], target):
                if kernels and step not in kernels:
                    continue
                attends = kernel is attend_kernel
                sizes = f"{tile.rows}x{tile.keys}, {tile.warps}w, {tile.stages}s, /{splits}"
                found = asdict(resources(kernel, launch, target))
                yield {"case": name, "kernel": step, "tile": sizes if attends else "",
                       "dtype": str(CASES[name].dtype), "attends": attends,
                       "target": target} | found  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--targets", nargs="+", default=[*TARGETS], choices=[*TARGETS])
    parser.add_argument("--cases", nargs="+", default=[*CASES], choices=[*CASES])
    parser.add_argument("--kernels", nargs="+", help="such as decode, prefill, write")
    parser.add_argument("--json", action="store_true", help="a line of JSON each")
    arguments = parser.parse_args()
    line = "{case:33}{kernel:17}{tile:19}{target:>7}{registers:>6}{spilled:>6}{shared:>8}"
    line += "{programs:>7}  {how}"
    if not arguments.json:
        print(line.format(case="case", kernel="kernel", tile="tile", target="target",
                          registers="regs", spilled="spill", shared="shared", programs="an SM",
                          how="tensor cores"))  # fmt: skip
    for row in rows(arguments.targets, arguments.cases, arguments.kernels):
        text = json.dumps(row) if arguments.json else line.format(how=row["tensor_cores"], **row)
        print(text.rstrip(), flush=True)


if __name__ == "__main__":
    main()
