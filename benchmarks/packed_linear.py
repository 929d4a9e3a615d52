"""Linear layers of bfloat16: plain weights, packed by oneDNN, and packed for our op.

    python benchmarks/packed_linear.py [--threads 1] [--rows 1,4,16,64,256]

The layers of SmolLM2-135M: thirty times QKV, output, gate and up, down, each pair of them also as
one layer, and its head. Weights are cold (212 MB of layers, read one after the other). One process,
interleaved, medians; a figure is the speed over plain weights, as torch's linear has them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from native.timing import medians
from torch import Tensor

from compiled_attn.ops import load, packed_linear

LAYERS = 30
APART = ((576, 576), (192, 576), (192, 576), (576, 576), (1536, 576), (1536, 576), (576, 1536))
JOINED = ((960, 576), (576, 576), (3072, 576), (576, 1536))
HEAD = ((49152, 576),)
Form = Callable[[int], None]
CASES = {"layers": APART * LAYERS, "joined": JOINED * LAYERS, "head": HEAD}


def forms(shapes, rows: int) -> dict[str, Form]:
    """What computes the layers, each with weights of its own."""
    weights = [torch.randn(shape).bfloat16() * 0.02 for shape in shapes]
    inputs = {k: torch.randn(rows, k).bfloat16() for _, k in shapes}
    onednn = [torch.ops.mkldnn._reorder_linear_weight(weight, rows) for weight in weights]
    ours, op = [packed_linear.pack(weight) for weight in weights], load().packed_linear
    pointwise = torch.ops.mkldnn._linear_pointwise.default

    def run(layers: list[Tensor], linear: Callable[[Tensor, Tensor], Tensor]) -> Form:
        def forward(_: int) -> None:
            for (_, size), layer in zip(shapes, layers, strict=True):
                linear(inputs[size], layer)

        return forward

    return {
        "plain": run(weights, torch.nn.functional.linear),
        "packed by oneDNN": run(onednn, lambda x, w: pointwise(x, w, None, "none", [], "")),
        "packed_linear": run(ours, op),
    }


def main() -> None:
    """Prints a row a case and number of rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", default="1,4,16,64,256")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(
        f"# bfloat16, {options.threads} threads, torch {torch.__version__}, op {load().isa}, cold"
    )
    print(f"{'':8}{'rows':>5}{'plain, ms':>11}{'oneDNN':>9}{'ours':>7}   (speed over plain)")
    with torch.no_grad():
        for name, shapes in CASES.items():
            for rows in map(int, options.rows.split(",")):
                plain, onednn, ours = medians(forms(shapes, rows), options.rounds).values()
                speeds = f"{plain / onednn:9.2f}{plain / ours:7.2f}"
                print(f"{name:8}{rows:5}{plain * 1e3:11.1f}{speeds}", flush=True)


if __name__ == "__main__":
    main()
