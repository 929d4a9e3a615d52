"""Float32 linear layers: MKL (what torch calls) against oneDNN (what our inductor pass calls).

    python benchmarks/linear.py [--threads 1]

One process, interleaved, medians; weights hot in cache, dense (not prepacked) for both.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

import graphs.backends.onednn_linear  # noqa: F401  (registers the op)

SHAPES = ((256, 256), (256, 688), (688, 256), (256, 4096), (2048, 2048))


def seconds(function, runs: int) -> float:
    """Time of one call."""
    started = time.perf_counter()
    for _ in range(runs):
        function()
    return (time.perf_counter() - started) / runs


def main() -> None:
    """Prints oneDNN's rate over MKL's for shapes of a small and a larger model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"# float32, {options.threads} threads, torch {torch.__version__}, hot weights")
    print(f"{'rows':>5} {'in':>5} {'out':>5}  oneDNN / MKL")
    for rows in (1, 8, 32, 256):
        for size_in, size_out in SHAPES:
            x, weight = torch.randn(rows, size_in), torch.randn(size_out, size_in)
            calls = {
                "mkl": lambda x=x, w=weight: torch.mm(x, w.t()),
                "onednn": lambda x=x, w=weight: torch.ops.graphs.onednn_linear(x, w, None),
            }
            times: dict[str, list[float]] = {name: [] for name in calls}
            for _ in range(15):
                for name, call in calls.items():
                    times[name].append(seconds(call, 10))
            ratio = statistics.median(times["mkl"]) / statistics.median(times["onednn"])
            print(f"{rows:5} {size_in:5} {size_out:5}  {ratio:.2f}")


if __name__ == "__main__":
    main()
