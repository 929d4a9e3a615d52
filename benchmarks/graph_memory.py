"""Memory of captured graphs: predicted from three captures, beside what all of them measured.

    python benchmarks/graph_memory.py [--backend holding] [--device cpu] [--width 1024] [--count 3]

Captures a feed-forward block at batches of 1 to 32 by lengths of 16 to 512, largest first, after
one capture that is not counted: it loads the compiler. Growth is reserved memory on an accelerator,
and resident memory on the CPU. A graph on the CPU holds no tensors, so its growth there is what the
compiler leaves behind, rounded to the pages that happened to be free: read the CPU's single rows as
noise. `holding` adds the inputs and outputs that a device's graphs hold to those of inductor.
"""

from __future__ import annotations

import argparse
import ctypes
from dataclasses import replace

import torch
from torch import nn

from graphs import Bucket, BucketSpace, capture, exponential
from graphs.backends import BACKENDS
from graphs.backends.inductor import InductorBackend
from graphs.buckets.graph_memory import GraphMemory, sample
from graphs.capture.contract import Backend, Frozen, Job

MIB = 2**20
M_MMAP_THRESHOLD = -3


class Holding(InductorBackend):
    """Graphs of inductor that hold copies of their inputs and outputs."""

    def capture(self, job: Job) -> Frozen:
        frozen = super().capture(job)
        held = [value.clone() for value in (*job.examples, job.function(*job.examples))]
        return replace(frozen, keep_alive=(frozen.keep_alive, held))


class Block(nn.Module):
    """A feed-forward block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


def measure(space: BucketSpace, backend: Backend, device: str, width: int) -> dict:
    """Growth of memory of each capture, largest first."""
    block = Block(width).to(device).eval()
    ordered = sorted(space, key=lambda bucket: -bucket["batch"] * bucket["length"])
    graphs, grown = [], {}
    with torch.no_grad():
        for bucket in [Bucket(batch=2, length=8), *ordered]:
            inputs = (torch.randn(bucket["batch"], bucket["length"], width, device=device),)
            graphs.append(capture(block, inputs, backend=backend, name="block"))
            grown[bucket] = graphs[-1].bytes
    return {bucket: grown[bucket] for bucket in ordered}


def main() -> None:
    """Prints a row per bucket, and the total."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="holding", help="holding, or one of graphs'")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--count", type=int, default=3, help="captures that are measured")
    options = parser.parse_args()
    if options.device == "cpu" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, MIB)  # freed temporaries go back to the system at once
    backend = Holding("holding") if options.backend == "holding" else BACKENDS[options.backend]
    space = exponential(batch=(1, 32, 4), length=(16, 512, 4))
    grown = measure(space, backend, options.device, options.width)
    chosen = sample([*space], options.count)
    memory = GraphMemory.fitted((bucket, grown[bucket]) for bucket in chosen)
    print(f"{options.backend} on {options.device}: {memory}")
    print("bucket                 measured MiB  predicted MiB")
    for bucket, size in grown.items():
        own = memory.of(bucket) + (memory.shared if bucket == chosen[0] else 0)
        used = "  fitted" if bucket in chosen else ""
        print(f"{bucket!s:<22} {size / MIB:12.2f} {own / MIB:14.2f}{used}")
    real, total = sum(grown.values()), memory.total(space)
    print(f"{'total':<22} {real / MIB:12.2f} {total / MIB:14.2f}  {total / real - 1:+.1%}")


if __name__ == "__main__":
    main()
