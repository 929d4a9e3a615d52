"""Linear layers of 4 to 8 bits: our op in both modes, torch's own int4 and int8 ops, bfloat16.

    python benchmarks/quantised_linear.py [--shapes smollm2,llama-1b] [--rows 1,4] [--threads 1]

Layers of SmolLM2-135M (all of them, then its head), and some of a Llama of a billion parameters,
with random weights, cold (read one after the other). QKV and gate-up are one call of our ops. One
process, interleaved, medians of processor time of one thread, or of time of several. A figure is
the time over that of bfloat16 weights packed for our op; in brackets the gigabytes of weights a
second. torch's ops for 4 bits take groups of 32 inputs; ``_dyn_quant_matmul_4bit`` is for Arm, and
plain C++ elsewhere (``--all``).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from compiled_attn.ops import load, packed_linear
from compiled_attn.ops.quantised_linear import QuantisedWeight, quantise
from compiled_attn.ops.timing import medians

Shape = tuple[int, int]
SMOLLM2 = [[(576, 576), (192, 576), (192, 576)], [(576, 576)], [(1536, 576)] * 2, [(576, 1536)]]
LLAMA = [
    [(2048, 2048), (512, 2048), (512, 2048)],
    [(2048, 2048)],
    [(8192, 2048)] * 2,
    [(2048, 8192)],
]
SHAPES: dict[str, list[list[Shape]]] = {
    "smollm2": SMOLLM2 * 30,
    "smollm2-head": [[(49152, 576)]],
    "llama-1b": LLAMA * 3,
}
aten = torch.ops.aten


def random(shape: Shape) -> Tensor:
    """A weight."""
    return (torch.randn(shape) * 0.02).bfloat16()


def k_quant(weight: Tensor, bits: int) -> QuantisedWeight:
    """A weight of random codes in the layout of Q4_K, or of Q6_K."""
    (outputs, inputs), steps = weight.shape, None
    codes = torch.randint(0, 1 << bits, weight.shape, dtype=torch.uint8)
    blocks = inputs // 256 if inputs % 256 == 0 else inputs // 32
    if bits == 6:
        steps = torch.randint(-128, 128, (outputs, inputs // 16)).to(torch.int8)
        return QuantisedWeight.pack(codes, bits, torch.rand(outputs, blocks).half() / 1000, steps)
    steps = torch.randint(0, 64, (outputs, inputs // 32, 2)).byte()
    return QuantisedWeight.pack(codes, bits, torch.rand(outputs, blocks, 2).half() / 1000, steps)


def ours(groups: list[list[Tensor]], pack: Callable[[Tensor], QuantisedWeight]) -> Any:
    """Makes what calls our op for each mode, and the bytes of the weights."""
    packed = [[pack(weight) for weight in group] for group in groups]
    lists = [[[w.codes for w in g], [w.scales for w in g], [w.steps for w in g]] for g in packed]
    return lists, sum(weight.nbytes for group in packed for weight in group)


def cases(
    groups: list[list[Shape]], rows: int, everything: bool
) -> Iterator[tuple[str, int, Callable[[], object]]]:
    """Name, bytes of the weights, and call of each contender."""
    ops, weights = load(), [[random(shape) for shape in group] for group in groups]
    inputs = [torch.randn(rows, group[0][1]).bfloat16() for group in groups]
    plain = sum(weight.nbytes for group in weights for weight in group)

    def each(op: Callable[..., object], lists: list[Any], *others: Any) -> None:
        for input, given in zip(inputs, lists, strict=True):
            op(input, *given, *others)

    def apart(op: Callable[..., object], lists: list[Any]) -> None:
        for input, given in zip(inputs, lists, strict=True):
            for layer in given:
                op(input, *layer)

    packed = [[[packed_linear.pack(weight) for weight in group]] for group in weights]
    yield "bfloat16", plain, partial(each, ops.packed_linears, packed)
    for bits in (4, 8):
        lists, size = ours(weights, partial(quantise, bits=bits))
        for mode, int8 in ((f"w{bits}a16", False), (f"w{bits}a8", True)):
            yield mode, size, partial(each, ops.quantised_linears, lists, [], int8)
    for name, bits in (("Q4_K", 4), ("Q5_K", 5), ("Q6_K", 6)):
        lists, size = ours(weights, partial(k_quant, bits=bits))
        yield f"{name} a8", size, partial(each, ops.quantised_linears, lists, [], True)
        yield f"{name} a16", size, partial(each, ops.quantised_linears, lists, [], False)

    int4 = [
        [
            (
                aten._convert_weight_to_int4pack_for_cpu(torch.randint(0, 16, w.shape).int(), 1),
                32,
                torch.rand(w.shape[1] // 32, w.shape[0], 2).bfloat16(),
            )
            for w in group
        ]
        for group in weights
    ]
    yield "torch int4", plain * 5 // 16, partial(apart, aten._weight_int4pack_mm_for_cpu, int4)
    int8 = [
        [
            (torch.randint(-128, 128, w.shape).to(torch.int8), torch.rand(w.shape[0]).bfloat16())
            for w in g
        ]
        for g in weights
    ]
    yield "torch int8", plain // 2, partial(apart, aten._weight_int8pack_mm, int8)
    if everything:
        dynamic = [[_dynamic(weight) for weight in group] for group in weights]
        yield "torch dyn4", plain * 9 // 32, partial(apart, _dyn_quant, dynamic)


def _dynamic(weight: Tensor) -> tuple[Any, ...]:
    outputs, inputs = weight.shape
    codes = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8)
    scales = torch.rand(outputs, inputs // 32)
    packed = aten._dyn_quant_pack_4bit_weight(codes, scales, None, 32, inputs, outputs)
    return packed, 32, inputs, outputs


def _dyn_quant(input: Tensor, *given: Any) -> Tensor:
    out: Tensor = aten._dyn_quant_matmul_4bit(input.float(), *given)
    return out


def main() -> None:
    """Prints a table for each shape and number of rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--rows", default="1,4,32,256")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--all", action="store_true", help="also ops that are slow here")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    print(f"# {options.threads} threads, torch {torch.__version__}, op {load().isa}, cold")
    torch.manual_seed(0)
    with torch.no_grad():
        for name in options.shapes.split(","):
            for rows in map(int, options.rows.split(",")):
                found = [*cases(SHAPES[name], rows, options.all)]
                names, sizes, calls = zip(*found, strict=True)
                for call in calls:
                    call()
                times = medians(calls, options.rounds, clock)
                print(f"{name}, {rows} rows: bfloat16 {times[0] * 1e3:.2f} ms")
                for each, size, spent in zip(names, sizes, times, strict=True):
                    rate = size / spent / 1e9
                    print(f"  {each:11} {spent / times[0]:5.2f}  ({rate:5.1f} GB/s)", flush=True)


if __name__ == "__main__":
    main()
