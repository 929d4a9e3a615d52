"""Host time of building a step: 128 decodes, and 127 decodes with a chunk of 2048 tokens.

    python benchmarks/builder.py [--batch 128] [--context 1024] [--block-size 128]

Microseconds from requests to padded tensors, medians, one process, and the same with a table four
times and sixteen times as wide (the longest possible sequence must not matter). Rows: `requests` is
`BatchBuilder.plan` on a list of `Request`, `table` is `plan_rows` on a `RequestTable`, `update` is
one appended block for every request of the table.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np

from compiled_attn.step import BatchBuilder, Request, RequestTable


def requests_of(batch: int, context: int, block_size: int, chunk: int) -> tuple[list[Request], int]:
    """Decodes around a context length, the last one replaced by a chunk; and the blocks needed."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(context - context // 10, context + context // 10, batch)
    new = np.ones(batch, np.int64)
    if chunk:
        new[-1] = chunk
    counts = -(-(lengths + new) // block_size)
    ids = rng.permutation(np.arange(1, counts.sum() + 1))
    tables = np.split(ids, np.cumsum(counts)[:-1])
    made = [
        Request(rng.integers(0, 1000, n), int(length), table)
        for n, length, table in zip(new, lengths, tables, strict=True)
    ]
    return made, int(counts.sum()) + 1


def microseconds(function: Callable[[], object], runs: int = 400) -> float:
    """Median time of a call."""
    times = []
    for _ in range(runs):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e6


def main() -> None:
    """Prints the two cases."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--block-size", type=int, default=128)
    options = parser.parse_args()
    print(f"# batch {options.batch}, context {options.context}, block {options.block_size}")
    for name, chunk in (("decodes", 0), ("decodes + chunk of 2048", 2048)):
        made, blocks = requests_of(options.batch, options.context, options.block_size, chunk)
        builder = BatchBuilder(blocks, options.block_size)
        bucket = {axis: -(-n // 64) * 64 for axis, n in builder.need(made).items()}
        us = microseconds(lambda b=builder, m=made, s=bucket: b.build(m, s))
        print(f"{name:24} requests              {us:7.1f} us")
        longest = max(len(request.block_table) for request in made)
        for width in (longest, 4 * longest, 16 * longest):
            table = RequestTable(options.batch, width)
            rows = np.array([table.add(i, r.block_table) for i, r in enumerate(made)])
            context = np.array([r.context_len for r in made])
            query = np.array([len(r.tokens) for r in made])
            tokens = np.concatenate([r.tokens for r in made])
            us = microseconds(
                lambda b=builder, t=table, s=bucket, a=(rows, context, query, tokens): b.plan_rows(
                    t, *a
                ).fill(s)
            )
            print(f"{name:24} table, {width:4} blocks wide {us:7.1f} us")
        wide = RequestTable(options.batch, 500)
        for index in range(options.batch):
            wide.add(index)
        us = microseconds(lambda t=wide: [t.extend(i, (1,)) for i in range(options.batch)], 400)
        print(f"{name:24} update                {us:7.1f} us")


if __name__ == "__main__":
    main()
