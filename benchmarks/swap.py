"""Bytes per second of captured swap lists, against a plain `copy_` of the same bytes.

    python benchmarks/swap.py [--threads 1] [--layers 8] [--blocks 1024] [--backend inductor]

One process, interleaved, medians. `swap` is one graph; `buffered` is an exchange as the
defragmenter does it, with one side stored outside of the cache until the other is written. Bytes
read and written: an exchange of P pairs reads and writes 2 P blocks, a move P blocks, `copy_` as
many bytes from one dense tensor to another. Caches are cold: pairs are random in every round, and
`copy_` uses the next part of two tensors as large as the cache. Times are those of the public
calls, including checks of the pairs.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch

from compiled_attn import PagedKVCache
from compiled_attn.cache.defrag import BlockSwap

# tokens in a block, KV heads, head dim, dtype
CASES = (
    (16, 4, 64, torch.bfloat16),
    (16, 8, 128, torch.bfloat16),
    (32, 8, 128, torch.float32),
    (128, 8, 128, torch.float8_e4m3fn),
)
PADS = (16, 64, 256)
METHODS = ("swap", "buffered", "move")


def timed(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def plain(nbytes: int, size: int) -> Iterator[Callable[[], object]]:
    """Copies of `nbytes`, each from and to the next part of tensors of `size` bytes."""
    source, target = (torch.zeros(size, dtype=torch.uint8).fill_(n) for n in range(2))
    parts = max(1, size // nbytes)
    for part in itertools.cycle(range(parts)):
        at = slice(part * nbytes, (part + 1) * nbytes)
        yield lambda at=at: target[at].copy_(source[at])


def buffered(swap: BlockSwap, pairs: list[tuple[int, int]]) -> None:
    """Exchanges as `OnlineDefragmenter` does."""
    sources, destinations = (list(blocks) for blocks in zip(*pairs, strict=True))
    contents = swap.take(destinations)
    swap.move(pairs)
    swap.put(sources, contents)


def measure(swap: BlockSwap, pairs: int, rounds: int) -> dict[str, float]:
    """Return bytes per second of each method; the first round is not counted."""
    moved = pairs * swap.bytes_per_block
    nbytes = {"swap": 2 * moved, "buffered": 2 * moved, "move": moved}
    size = swap.num_blocks * swap.bytes_per_block
    copies = {name: plain(count, size) for name, count in nbytes.items()}
    calls = {"swap": swap.swap, "buffered": functools.partial(buffered, swap), "move": swap.move}
    seconds: dict[str, list[float]] = {}
    rng = np.random.default_rng(0)
    for _ in range(rounds + 1):
        for name, call in calls.items():
            chosen = rng.choice(swap.num_blocks - 1, 2 * pairs, replace=False) + 1
            listed = list(zip(*chosen.reshape(2, pairs).tolist(), strict=True))
            copy = next(copies[name])
            seconds.setdefault(name, []).append(timed(lambda c=call, p=listed: c(p)))
            seconds.setdefault(f"copy_ for {name}", []).append(timed(copy))
    return {
        name: 2 * nbytes[name.split()[-1]] / statistics.median(times[1:])
        for name, times in seconds.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=1024)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(
        f"# {options.backend}, {options.threads} threads, {options.layers} layers of K and V, "
        f"{options.blocks} blocks, torch {torch.__version__}, cold"
    )
    columns = "".join(f"  {name:>8} GB/s  of copy_" for name in METHODS)
    print(f"dtype          a layer's block  pairs{columns}")
    for size, heads, dim, dtype in CASES:
        cache = PagedKVCache(options.layers, options.blocks, size, heads, dim, dtype=dtype)
        for tensor in cache.buffers():
            tensor.zero_()  # touched, so that no page is the system's zero page
        pads = [pad for pad in PADS if 2 * pad < options.blocks]
        swap = BlockSwap(cache, pad_sizes=pads, backend=options.backend)
        swap.warmup()
        for pairs in pads:
            rate = measure(swap, pairs, options.rounds)
            kib = size * heads * dim * dtype.itemsize / 1024
            cells = "".join(
                f"  {rate[name] / 1e9:13.1f} {rate[name] / rate[f'copy_ for {name}']:9.2f}"
                for name in METHODS
            )
            print(f"{str(dtype)[6:]:14} {kib:11.0f} KiB {pairs:6}{cells}")


if __name__ == "__main__":
    main()
