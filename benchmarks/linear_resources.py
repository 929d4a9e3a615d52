"""Registers, memory and instructions of the linear layers of 4 to 8 bits, for absent devices.

    python benchmarks/linear_resources.py [--targets sm_90 ...] [--cases NAME ...] [--json]

Needs the extra `triton`, and no GPU.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from accelerator.resources import TARGETS, resources

from compiled_attn.ops.triton.arguments import Launch
from compiled_attn.ops.triton.linear import linear_kernel, rows_kernel
from compiled_attn.ops.triton.linear_launch import linear_launch, rows_launch, tile_of

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
N = K = 4096
# Of each format: bits, groups of scales of K inputs, what scales have, groups and dtype of steps.
FORMATS: dict[str, tuple[int, int, tuple[int, ...], int, torch.dtype | None]] = {
    "Q4_0": (4, K // 32, (16,), 0, None),
    "Q4_1": (4, K // 32, (2, 16), 0, None),
    "Q4_K": (4, K // 256, (2, 16), K // 32, torch.uint8),
    "Q5_K": (5, K // 256, (2, 16), K // 32, torch.uint8),
    "Q6_K": (6, K // 256, (16,), K // 16, torch.int8),
    "Q8_0": (8, K // 32, (16,), 0, None),
    "AWQ": (4, K // 128, (16,), K // 128, torch.uint8),
    "int8 by row": (8, 1, (16,), 0, None),
}


@dataclass(frozen=True)
class Case:
    """A bucket: format, dtype of inputs, and whether they are rounded to int8."""

    form: str
    dtype: torch.dtype = BF16
    int8_inputs: bool = False


CASES = {form: Case(form) for form in FORMATS} | {
    "Q4_0, int8 inputs": Case("Q4_0", int8_inputs=True),
    "Q6_K, int8 inputs": Case("Q6_K", int8_inputs=True),
    "Q8_0, int8 inputs": Case("Q8_0", int8_inputs=True),
    "Q4_K, float16": Case("Q4_K", F16),
    "Q5_K, float32, int8 inputs": Case("Q5_K", F32, int8_inputs=True),
}
ROWS = (8, 16, 32, 64, 512)


def kernels_of(case: Case) -> Iterator[tuple[str, Any, Launch]]:
    """Each kernel of a case: name, kernel, launch of tensors without memory."""

    def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    bits, groups, of_group, small, kind = FORMATS[case.form]
    codes = empty(N // 16, K // 32, 64 * bits, dtype=torch.uint8)
    scales = empty(N // 16, groups, *of_group, dtype=F32 if groups == 1 else F16)
    steps = empty(N // 16, small, *of_group, dtype=kind) if kind else empty(0, dtype=torch.uint8)
    for rows in ROWS:
        input, out = empty(rows, K, dtype=case.dtype), empty(rows, N, dtype=case.dtype)
        tile = tile_of(rows, K, case.dtype)
        given = input, codes, scales, steps, empty(N, dtype=case.dtype)
        yield f"{rows} rows", linear_kernel, linear_launch(given, out, tile, case.int8_inputs)
    ids = empty(64, dtype=torch.int64)
    yield "look-up", rows_kernel, rows_launch(codes, scales, steps, ids, empty(64, K, dtype=F32))


def rows(
    targets: list[str], cases: list[str], kernels: list[str] | None = None
) -> Iterator[dict[str, Any]]:
    """The resources of the kernels of these names; None: of all."""
    for name in cases:
        for target in targets:
            for what, kernel, launch in kernels_of(CASES[name]):
                if not kernels or what in kernels:
                    found = asdict(resources(kernel, launch, target))
                    yield {"case": name, "kernel": what, "target": target} | found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--targets", nargs="+", default=[*TARGETS], choices=[*TARGETS])
    parser.add_argument("--cases", nargs="+", default=[*CASES], choices=[*CASES])
    parser.add_argument("--kernels", nargs="+", help="such as '8 rows', look-up")
    parser.add_argument("--json", action="store_true", help="a line of JSON each")
    arguments = parser.parse_args()
    line = (
        "{case:28}{kernel:10}{target:>7}{registers:>6}{spilled:>6}{shared:>8}{programs:>7}  {how}"
    )
    if not arguments.json:
        print(line.format(case="case", kernel="kernel", target="target", registers="regs",
                          spilled="spill", shared="shared", programs="an SM",
                          how="tensor cores"))  # fmt: skip
    for row in rows(arguments.targets, arguments.cases, arguments.kernels):
        text = json.dumps(row) if arguments.json else line.format(how=row["tensor_cores"], **row)
        print(text.rstrip(), flush=True)


if __name__ == "__main__":
    main()
