"""Partial attention under inductor: torch's fused CPU kernel against the reference; each part.

    python benchmarks/attend.py [--threads 1] [--against DIRECTORY]

Dense: T queries against N keys under a mask, 8 query and 4 key heads of 32. Parts, 32 query heads
on 8 KV heads of 128, blocks of 16: causal (a chunk of new tokens), shared (queries on a common
prefix), unique (decodes on blocks of their own). float32 and bfloat16, one process, interleaved,
medians; keys hot in cache.

With ``--against`` the parts alone are timed, in turns with a second process that imports the
checkout in that directory: time here over time there.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from native.against import answer, other_process
from torch import Tensor

from compiled_attn.attention.dense import attend
from compiled_attn.attention.merge import merge
from compiled_attn.attention.parts import (
    partial_attn_causal,
    partial_attn_shared,
    partial_attn_unique,
)
from compiled_attn.attention.sdpa import SdpaKernel
from compiled_attn.cache.kv_cache import usage_bias

BLOCK, HEADS, KV_HEADS, DIM = 16, 32, 8, 128
DTYPES = torch.float32, torch.bfloat16
KERNELS = {"reference": attend, "sdpa": SdpaKernel.attend}
Run = Callable[[], object]


def compiled(part: Callable[..., object], *arguments: Tensor | None, **options: object) -> Run:
    """A call of a compiled partial attention, normalised; compiled now."""
    torch._dynamo.reset()
    graph = torch.compile(
        lambda *tensors: merge(part(*tensors, **options)), fullgraph=True, dynamic=False
    )
    graph(*arguments)
    return lambda: graph(*arguments)


def seconds(run: Run) -> float:
    """Of the processor where there is one thread, which others on the machine disturb less."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    started = clock()
    run()
    return clock() - started


def print_dense(rounds: int) -> None:
    print(f"{'dtype':>9} {'T':>4} {'N':>6}  reference over sdpa")
    for dtype in DTYPES:
        for queries, keys in ((32, 512), (256, 256), (256, 1024), (256, 4096)):
            query = torch.randn(queries, 8, 32, dtype=dtype)
            key, value = (torch.randn(keys, 4, 32, dtype=dtype) for _ in range(2))
            bias = torch.where(torch.rand(queries, keys) < 0.5, 0.0, -math.inf)
            runs = [compiled(k, query, key, value, bias, scale=0.2) for k in KERNELS.values()]
            times = [[seconds(run) for run in runs] for _ in range(rounds)]
            reference, sdpa = (statistics.median(spent) for spent in zip(*times, strict=True))
            print(f"{str(dtype)[6:]:>9} {queries:4} {keys:6}  {reference / sdpa:.2f}", flush=True)


def parts(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], Run]]]:
    """Each part by its name, not yet compiled."""
    torch.manual_seed(0)
    caches = [torch.randn(2048 * BLOCK, KV_HEADS, DIM).to(dtype) for _ in range(2)]
    blocks = torch.randperm(2048)
    shape = {"block_size": BLOCK, "scale": DIM**-0.5}
    for name, kernel in KERNELS.items():
        query, key, value = (
            torch.randn(512, heads, DIM).to(dtype) for heads in (HEADS, KV_HEADS, KV_HEADS)
        )
        bias = torch.full((512, 512), -math.inf).triu(1)
        options = {"scale": DIM**-0.5, "attend": kernel}
        arguments = (query, key, value, bias)
        yield f"causal 512, {name}", partial(compiled, partial_attn_causal, *arguments, **options)
    for name, kernel in KERNELS.items():
        for queries in (16, 128):
            query = torch.randn(queries, HEADS, DIM).to(dtype)
            usage = torch.full((queries, 128), BLOCK, dtype=torch.int32)
            arguments = (query, *caches, blocks[:128], usage)
            options = {**shape, "attend": kernel, "lengths": torch.full((128,), BLOCK)}
            run = partial(compiled, partial_attn_shared, *arguments, **options)
            yield f"shared {queries} on 2048, {name}", run
    for queries, each in ((1, 128), (16, 128), (128, 16)):
        query = torch.randn(queries, HEADS, DIM).to(dtype)
        mapping = torch.arange(queries).repeat_interleave(each)
        bias = usage_bias(torch.full((queries * each,), BLOCK), BLOCK)
        arguments = (query, *caches, blocks[: queries * each], mapping, bias)
        options = {**shape, "queries_used": torch.arange(queries)}
        run = partial(compiled, partial_attn_unique, *arguments, **options)
        yield f"unique {queries} on {each * BLOCK}", run


def chosen(only: str) -> list[tuple[str, Callable[[], Run]]]:
    """Name and maker of each selected part, of each dtype."""
    return [
        (f"{str(dtype)[6:]:>9} {name}", make)
        for dtype in DTYPES
        for name, make in parts(dtype)
        if only in name
    ]


def print_parts(options: argparse.Namespace) -> None:
    arguments = "--only", options.only, "--rounds", str(options.rounds)
    arguments += "--threads", str(options.threads)
    line = other_process(options.against, *arguments) if options.against else None
    print(f"{'dtype':>9} {'part':30} ms here" + ("  here over there" if line else ""))
    for name, make in chosen(options.only):
        assert line is None or line() == name.strip(), "the other checkout has other parts"
        run = make()
        pairs = [(seconds(run), float(line()) if line else 1.0) for _ in range(options.rounds)]
        here = statistics.median(pair[0] for pair in pairs)
        ratio = statistics.median(mine / theirs for mine, theirs in pairs)
        print(f"{name:40} {here * 1e3:7.2f}" + (f"{ratio:10.2f}" if line else ""), flush=True)


def main() -> None:
    """Prints the tables, or answers a process that does."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--against", metavar="DIRECTORY", help="a checkout to compare with")
    parser.add_argument("--only", default="", help="parts with this in their names")
    parser.add_argument("--answers", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with torch.no_grad():
        if options.answers:
            return answer(chosen(options.only), seconds, options.rounds)
        print(f"# inductor, {options.threads} threads, torch {torch.__version__}, hot keys")
        if not options.against:
            print_dense(options.rounds)
        print_parts(options)


if __name__ == "__main__":
    main()
