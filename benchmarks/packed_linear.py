"""Linear layers: plain weights, packed by oneDNN, packed for our op, fused, as bf16-widen.

    python benchmarks/packed_linear.py [--dtype float32] [--threads 1] [--rows 1,4,16,64,256]

The layers of SmolLM2-135M: thirty times QKV, output, gate and up, down, and its head. Fused, QKV
are one call of our op, gate and up one, as in an engine's graphs. Weights are cold (212 MB of
layers in bfloat16, read one after the other). One process, interleaved, medians; a figure is the
speed over plain weights, as torch's linear has them. In float32 that is MKL's, and oneDNN takes
plain weights too; weights are exact in bfloat16, and bf16-widen: their upper 16 bits, fused.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from native.timing import medians
from torch import Tensor

from compiled_attn.ops import load, packed_linear

LAYERS = 30
QKV, OUT = [(576, 576), (192, 576), (192, 576)], [(576, 576)]
GATE_UP, DOWN = [(1536, 576), (1536, 576)], [(576, 1536)]
Call = Callable[[int], None]
CASES = {"layers": [QKV, OUT, GATE_UP, DOWN] * LAYERS, "head": [[(49152, 576)]]}


def has_onednn(dtype: torch.dtype) -> bool:
    """Whether oneDNN has layers of a dtype here: of bfloat16 not on every processor."""
    return dtype is torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def calls(groups: list[list[tuple[int, int]]], rows: int, dtype: torch.dtype) -> dict[str, Call]:
    """What computes groups of layers of one input, each with weights of its own."""
    weights = [[(torch.randn(s) * 0.02).bfloat16().to(dtype) for s in group] for group in groups]
    ours, ops = [[packed_linear.pack(weight) for weight in g] for g in weights], load()
    inputs = [torch.randn(rows, group[0][1]).to(dtype) for group in groups]
    pointwise = torch.ops.mkldnn._linear_pointwise.default

    def fused(layers: list[list[Tensor]]) -> Call:
        def forward(_: int) -> None:
            for input, group in zip(inputs, layers, strict=True):
                ops.packed_linears(input, group)

        return forward

    def run(layers: list[list[Any]], linear: Callable[[Tensor, Any], Tensor]) -> Call:
        def forward(_: int) -> None:
            for input, group in zip(inputs, layers, strict=True):
                for layer in group:
                    linear(input, layer)

        return forward

    found = {"plain": run(weights, torch.nn.functional.linear)}
    if has_onednn(dtype):
        reordered = weights
        if dtype is torch.bfloat16:
            reorder = torch.ops.mkldnn._reorder_linear_weight
            reordered = [[reorder(weight, rows) for weight in g] for g in weights]
        found["oneDNN"] = run(reordered, lambda x, w: pointwise(x, w, None, "none", [], ""))
    found |= {"ours": run(ours, ops.packed_linear), "fused": fused(ours)}
    if dtype is torch.float32:
        found["bf16-widen"] = fused(
            [[packed_linear.pack_bf16(weight) for weight in g] for g in weights]
        )
    return found


def main() -> None:
    """Prints a row a case and number of rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", default="1,4,16,64,256")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    on = f"{options.threads} threads, torch {torch.__version__}, op {load().isa}"
    print(f"# {options.dtype}, {on}, cold")
    others = ["oneDNN"] if has_onednn(dtype) else []
    others += ["ours", "fused", *["bf16-widen"] * (dtype is torch.float32)]
    names = "".join(f"{name:>8}" for name in others)
    print(f"{'':8}{'rows':>5}{'plain, ms':>11}{names}   (speed over plain)")
    with torch.no_grad():
        for name, groups in CASES.items():
            for rows in map(int, options.rows.split(",")):
                plain, *times = medians(calls(groups, rows, dtype), options.rounds).values()
                speeds = "".join(f"{plain / each:8.2f}" for each in times)
                print(f"{name:8}{rows:5}{plain * 1e3:11.1f}{speeds}", flush=True)


if __name__ == "__main__":
    main()
