"""Dense partial attention under inductor: the reference against torch's fused CPU kernel.

    python benchmarks/attend.py [--threads 1]

T queries against N keys under a mask, 8 query and 4 key heads of 32, float32 and bfloat16. One
process, interleaved, medians; keys hot in cache.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time

import torch

from compiled_attn.kernels import SdpaKernel
from compiled_attn.partial import attend, merge


def compiled(kernel):
    """A compiled partial attention, normalised."""

    def run(query, key, value, bias):
        return merge(kernel(query, key, value, bias, scale=0.2))

    return torch.compile(run, fullgraph=True, dynamic=False)


def main() -> None:
    """Prints the time of the reference over that of the sdpa kernel."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"# inductor, {options.threads} threads, torch {torch.__version__}, hot keys")
    print(f"{'dtype':>9} {'T':>4} {'N':>6}  sdpa over reference")
    for dtype in (torch.float32, torch.bfloat16):
        for queries, keys in ((32, 512), (256, 256), (256, 1024), (256, 4096)):
            query = torch.randn(queries, 8, 32, dtype=dtype)
            key, value = (torch.randn(keys, 4, 32, dtype=dtype) for _ in range(2))
            bias = torch.where(torch.rand(queries, keys) < 0.5, 0.0, -math.inf)
            torch._dynamo.reset()
            forms = {"reference": compiled(attend), "sdpa": compiled(SdpaKernel.attend)}
            times: dict[str, list[float]] = {name: [] for name in forms}
            with torch.no_grad():
                for _ in range(20):
                    for name, form in forms.items():
                        started = time.perf_counter()
                        form(query, key, value, bias)
                        times[name].append(time.perf_counter() - started)
            ratio = statistics.median(times["reference"]) / statistics.median(times["sdpa"])
            print(f"{str(dtype)[6:]:>9} {queries:4} {keys:6}  {ratio:.2f}")


if __name__ == "__main__":
    main()
