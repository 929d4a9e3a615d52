"""One million random events on blocks, with a real cache whose content is checked throughout.

    python benchmarks/soak.py [--events 1000000] [--seed 0] [--blocks 600] [--block-size 4]

Events are those of a crowded server, at random: allocate, append, fork, free, preempt, defragment,
and a defragmentation whenever one is due. Every token writes a payload that depends on all tokens
before it to its block, in K and in V. A request is read back when it is added
(its hits), forked, freed or preempted, and all of them every thousand events, when the counts are
compared with those of a plain model too. Prints figures; a violation ends it with exit status 1.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from compiled_attn.cache.blocks import BlockPool, OutOfBlocks
from compiled_attn.cache.defrag import BlockSwap, OnlineDefragmenter

# Shares of the events, and how many requests there may be at once.
SHARES = {
    "append": 0.62,
    "allocate": 0.12,
    "fork": 0.07,
    "free": 0.12,
    "preempt": 0.04,
    "defragment": 0.03,
}
MAX_REQUESTS = 48
LONGEST = 4096


class Violation(Exception):
    """An invariant is violated."""


def require(condition: object, message: str) -> None:
    if not condition:
        raise Violation(message)


@dataclass
class Stream:
    """A request: its tokens, of which ``length`` are reserved and written."""

    tokens: NDArray[np.int64]
    length: int


class Soak:
    """A pool, a cache of flat K and V slots, and the requests on them."""

    def __init__(
        self,
        blocks: int,
        size: int,
        seed: int,
        backend: str = "eager",
        pad_sizes: Sequence[int] = (8, 64),
    ) -> None:
        self.rng = np.random.default_rng(seed)
        self.size = size
        self.pool = BlockPool(blocks, size)
        self.cache = [torch.zeros(blocks * size, dtype=torch.int64) for _ in range(2)]
        self.slots = [tensor.numpy() for tensor in self.cache]
        self.swap = BlockSwap(self.cache, blocks, pad_sizes=pad_sizes, backend=backend)
        self.swap.warmup()
        self.defragmenter = OnlineDefragmenter(self.pool, self.swap)
        self.streams: dict[int, Stream] = {}
        self.counts: Counter[str] = Counter()
        self.spread: list[float] = []
        self.next_id = 0
        self.factors = self.rng.integers(1, 2**62, LONGEST) | 1
        # Prompts begin like one of a few others, so that they find each other's blocks.
        self.common = self.rng.integers(0, 1 << 30, (6, 40 * size))

    def run(self, events: int, check_every: int = 1000) -> None:
        chosen = self.rng.choice(list(SHARES), events, p=list(SHARES.values()))
        for number, event in enumerate(chosen.tolist(), 1):
            getattr(self, event)()
            self.counts[event] += 1
            if self.defragmenter.is_due:
                self.defragment()
                self.counts["due"] += 1
            if number % check_every == 0 or number == events:
                self.check()

    def allocate(self) -> None:
        if len(self.streams) >= MAX_REQUESTS:
            self.free()
        length = int(self.rng.integers(1, 30 * self.size))
        shared = int(self.rng.integers(0, length + 1))
        own = self.rng.integers(0, 1 << 30, length - shared)
        self.add(np.concatenate((self.common[self.rng.integers(6)][:shared], own)))

    def append(self) -> None:
        if self.streams:
            name = self.pick()
            more = int(self.rng.integers(1, 3)) if self.rng.random() < 0.95 else 3 * self.size
            if self.streams[name].length + more > LONGEST:
                self.drop(name, self.pool.free)
            else:
                self.grow(name, self.streams[name].length + more)

    def fork(self) -> None:
        if 0 < len(self.streams) < MAX_REQUESTS:
            parent, child = self.pick(), self.new_id()
            stream = self.streams[parent]
            self.pool.fork(parent, child)
            self.streams[child] = Stream(stream.tokens[: stream.length].copy(), stream.length)
            self.read_back(child)

    def free(self) -> None:
        if self.streams:
            self.drop(self.pick(), self.pool.free)

    def preempt(self) -> None:
        """Preempts a request and adds it again."""
        if self.streams:
            name = self.pick()
            tokens = self.streams[name].tokens
            self.drop(name, self.pool.preempt)
            self.add(tokens)

    def defragment(self) -> None:
        before = self.pool.highest_used
        report = self.defragmenter.defragment()
        require(report.range_after <= before, "a defragmentation enlarged the range")
        require(report.range_after == self.pool.highest_used, "a report says another range")

    def add(self, tokens: NDArray[np.int64]) -> None:
        name = self.new_id()
        table = self.pool.add(name, tokens)
        self.streams[name] = Stream(tokens, table.length)
        self.copy()
        self.read_back(name)
        self.grow(name, len(tokens))

    def grow(self, name: int, length: int) -> None:
        """Reserves, copies shared blocks, writes and commits; preempts others if needed."""
        while not self.pool.can_reserve(name, length):
            try:
                self.pool.reserve(name, length)
            except OutOfBlocks:
                self.counts["out of blocks"] += 1
            else:
                raise Violation("a reservation that cannot succeed did")
            others = [other for other in self.streams if other != name]
            if not others:
                self.drop(name, self.pool.preempt)
                return
            self.drop(others[-1], self.pool.preempt)
        self.pool.reserve(name, length)
        self.copy()
        self.write(name, length)

    def copy(self) -> None:
        pairs = self.pool.pending_copies()
        if pairs:
            self.swap.move(pairs)
            self.pool.copied(pairs)

    def write(self, name: int, length: int) -> None:
        stream = self.streams[name]
        missing = length - len(stream.tokens)
        if missing > 0:
            more = self.rng.integers(0, 1 << 30, missing)
            stream.tokens = np.concatenate((stream.tokens, more))
        start, stream.length = stream.length, max(stream.length, length)
        positions = self.slots_of(name, stream.length)[start:]
        payload = self.payload(stream)[start:]
        self.slots[0][positions], self.slots[1][positions] = payload, ~payload
        self.pool.commit(name, stream.tokens, stream.length)

    def drop(self, name: int, how: object) -> None:
        self.read_back(name)
        how(name)  # type: ignore[operator]
        del self.streams[name]

    def pick(self) -> int:
        names = list(self.streams)
        return names[int(self.rng.integers(len(names)))]

    def new_id(self) -> int:
        self.next_id += 1
        return self.next_id

    def payload(self, stream: Stream) -> NDArray[np.int64]:
        """The payload of each position: a hash of all tokens up to it."""
        return np.cumsum((stream.tokens[: stream.length] + 1) * self.factors[: stream.length])

    def slots_of(self, name: int, length: int) -> NDArray[np.int64]:
        """The slot of each position below ``length``."""
        blocks = np.array(self.pool.table(name).blocks, dtype=np.int64)
        return (blocks[:, None] * self.size + np.arange(self.size)).reshape(-1)[:length]

    def read_back(self, name: int) -> None:
        stream = self.streams[name]
        positions, payload = self.slots_of(name, stream.length), self.payload(stream)
        for slots, expected in zip(self.slots, (payload, ~payload), strict=True):
            wrong = np.flatnonzero(slots[positions] != expected)
            require(not wrong.size, f"request {name} lost positions {wrong[:5]}")

    def check(self) -> None:
        for name in self.streams:
            self.read_back(name)
        pool, stats = self.pool, self.pool.stats()
        held = [block for name in self.streams for block in pool.table(name).blocks]
        counts = np.bincount(held, minlength=pool.num_blocks)
        require(np.array_equal(counts, pool.refcounts), "reference counts differ from the tables")
        used = np.flatnonzero(counts)
        require(stats.used == len(used) == pool.num_used, "used blocks are counted wrongly")
        require(stats.used + stats.free + stats.cached == stats.total, "blocks leaked")
        require(stats.highest_used == used.max(initial=0), "the range is another")
        require(not any(tensor[: self.size].any() for tensor in self.cache), "null block written")
        if len(used):
            self.spread.append(stats.highest_used / len(used))

    def figures(self, seconds: float) -> str:
        stats, totals = self.pool.stats(), self.defragmenter.totals
        events = sum(self.counts[event] for event in SHARES)
        spread = self.spread or [1.0]
        return "\n".join(
            (
                f"events          {events} in {seconds:.1f} s, {events / seconds:.0f}/s",
                "                " + ", ".join(f"{name} {n}" for name, n in self.counts.items()),
                f"allocations     {stats.allocations}, evictions {stats.evictions}, "
                f"copies on write {stats.copies}, preemptions {stats.preemptions}, "
                f"hit ratio {stats.hit_ratio:.3f}",
                f"moves           {totals.moves} in {totals.calls} calls, {totals.swaps} of them "
                f"exchanges, {totals.moves / max(1, stats.allocations):.4f} per allocation",
                f"range over used {np.mean(spread):.3f} mean, {max(spread):.3f} worst",
                "violations      0",
            )
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--blocks", type=int, default=600)
    parser.add_argument("--block-size", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"# {options.blocks} blocks of {options.block_size}, at most {MAX_REQUESTS} requests, "
        f"seed {options.seed}",
        flush=True,
    )
    soak = Soak(options.blocks, options.block_size, options.seed)
    started = time.perf_counter()
    try:
        soak.run(options.events)
    except Violation as violation:
        done = sum(soak.counts[event] for event in SHARES)
        print(f"violation after {done} events: {violation}", file=sys.stderr)
        return 1
    print(soak.figures(time.perf_counter() - started))
    return 0


if __name__ == "__main__":
    sys.exit(main())
