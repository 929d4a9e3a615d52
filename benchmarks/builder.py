"""Host time from scheduled tokens to padded tensors, as the engine does it each step.

    python benchmarks/builder.py [--batch 128] [--context 1024] [--block-size 32]

128 decodes, and 127 decodes with a chunk of 512 tokens. Median microseconds, one process,
interleaved: `table` updates the tables of the requests, plans rows of them and fills the bucket, as
an engine does; `list` does it from a list of `Request`, whose tables are gathered each step. For
both layouts of a step, and for tables four and sixteen times as wide (the longest possible request
must not matter to a step in parts; a row of a table is copied whole).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping

import numpy as np

from compiled_attn.cache.blocks import BlockPool
from compiled_attn.engine.block_memory import StepTables
from compiled_attn.step import BatchBuilder, PartsLayout, Request, StepLayout, TableLayout
from graphs.report.surroundings import machine


def requests_of(batch: int, context: int, chunk: int) -> tuple[list[int], list[list[int]]]:
    """Contexts around a length, and new tokens: one each, the last a chunk."""
    rng = np.random.default_rng(0)
    contexts = rng.integers(context - context // 10, context + context // 10, batch)
    new = [1] * (batch - 1) + [chunk or 1]
    return contexts.tolist(), [rng.integers(0, 1000, n).tolist() for n in new]


def steps(
    layout: StepLayout, pool: BlockPool, contexts: list[int], new: list[list[int]], width: int
) -> dict[str, Callable[[], object]]:
    """Two ways to build one step."""
    tables = StepTables(pool, 2 * len(new), width)
    builder = BatchBuilder(pool.num_blocks, pool.block_size)
    ids, counts = range(len(new)), [len(tokens) for tokens in new]
    held = [pool.table(each).block_table() for each in ids]

    def from_table() -> object:
        table = tables.of(ids)
        tokens = [token for each in new for token in each]
        rows = [table.row(each) for each in ids]
        plan = layout.plan(builder.rows(table, rows, contexts, counts, tokens))
        return plan.fill(_bucket(plan.need))

    def from_list() -> object:
        made = [Request(*each) for each in zip(new, contexts, held, strict=True)]
        plan = layout.plan(builder.rows_of(made))
        return plan.fill(_bucket(plan.need))

    return {"table": from_table, "list": from_list}


def medians(functions: Mapping[str, Callable[[], object]], runs: int = 300) -> dict[str, float]:
    """Median microseconds of each, interleaved."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(runs):
        for name, function in functions.items():
            started = time.perf_counter()
            function()
            times[name].append(time.perf_counter() - started)
    return {name: statistics.median(each) * 1e6 for name, each in times.items()}


def main() -> None:
    """Prints a row for each case, layout and width."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--block-size", type=int, default=32)
    options = parser.parse_args()
    print(f"# {machine()['cpu']}, batch {options.batch}, context {options.context}, "
          f"block {options.block_size}")  # fmt: skip
    print(f"{'step':24} {'layout':7} {'width':>5} {'table us':>9} {'table / list':>12}")
    for name, chunk in (("decodes", 0), ("decodes + chunk of 512", 512)):
        contexts, new = requests_of(options.batch, options.context, chunk)
        longest = -(-(2 * options.context + chunk) // options.block_size)
        pool = BlockPool(1 + options.batch * longest, options.block_size)
        for index, (context, tokens) in enumerate(zip(contexts, new, strict=True)):
            pool.add(index)
            pool.reserve(index, context + len(tokens))
        for kind in (TableLayout, PartsLayout):
            for width in (longest, 4 * longest, 16 * longest):
                layout = kind(pool.num_blocks, pool.block_size, width)
                us = medians(steps(layout, pool, contexts, new, width))
                ratio = us["table"] / us["list"]
                row = f"{name:24} {kind.__name__:7} {width:5} {us['table']:9.1f} {ratio:12.2f}"
                print(row, flush=True)


def _bucket(need: Mapping[str, int]) -> dict[str, int]:
    return {axis: -(-size // 64) * 64 for axis, size in need.items()}


if __name__ == "__main__":
    main()
