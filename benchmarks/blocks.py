"""Host time of block pool calls by pool size, and how spread out a pool leaves the blocks in use.

    python benchmarks/blocks.py [--trace FILE ...] [--limit 3000] [--block-size 128]

First table: CPU microseconds of calls to a `BlockPool`, its blocks four fifths in use by requests
of 8 or 9 blocks of 16. In the rows `cached` all prompts are committed, so that the other fifth is
cached and allocations evict; else that fifth is free, scattered over the pool. Medians of rounds in
which the sizes take turns, one process, no garbage collection; `growth` is last size over first.

Further tables: requests of a trace, served at their times by continuous batching without a model, a
token a step, until the last one arrives. `range/used` is the highest used block over the number
of used blocks, mean and 99th percentile over the steps, without and with an `OnlineDefragmenter`
whose copies are left out. The pool has a quarter more blocks than are ever in use at once.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from compiled_attn.cache.blocks import BlockPool
from compiled_attn.cache.blocks.states import BlockStates
from compiled_attn.cache.defrag import OnlineDefragmenter
from compiled_attn.workloads import Arrival, read_trace

FOLDER = Path(__file__).resolve().parents[2] / "shared/traces"
TRACES = "azure2023_conv.csv", "azure2023_code.csv", "mooncake_conversation_head.jsonl"
SIZES = 10**3, 10**4, 10**5, 10**6
SLOTS, PROMPT = 16, 120  # of the first table: a prompt takes 8 blocks, the last one is half full


class Caller:
    """A pool in a steady state, and the time of the calls that keep it there."""

    def __init__(self, num_blocks: int, is_cached: bool) -> None:
        self.random = random.Random(0)
        self.is_cached = is_cached
        self.seconds: dict[str, float] = {}
        self.pool = self.timed("make", BlockPool, num_blocks, SLOTS)
        self.count = 0
        self.names: list[int] = []
        while self.pool.available > 8:
            self.allocate()
            self.append(self.names[-1])
        for _ in range(len(self.names) // 5):
            self.free()
        while is_cached and self.pool.stats().free > 9:  # until hardly any block is free
            self.free()
            self.allocate()
            self.append(self.names[-1])

    def timed(self, call: str, function: Callable[..., Any], *arguments: object) -> Any:
        started = time.thread_time()
        result = function(*arguments)
        self.seconds[call] = self.seconds.get(call, 0.0) + time.thread_time() - started
        return result

    def allocate(self) -> None:
        name, self.count = self.count, self.count + 1
        call = "allocate 8, cached" if self.is_cached else "allocate 8"
        self.timed(call, self.pool.add, name, tokens_of(name))
        self.timed(call, self.pool.reserve, name, PROMPT)
        if self.is_cached:
            self.timed("commit 7, cached", self.pool.commit, name, tokens_of(name), PROMPT)
        self.names.append(name)

    def append(self, name: int) -> None:
        call = "append 1, cached" if self.is_cached else "append 1"
        self.timed(call, self.pool.append, name, SLOTS)

    def free(self) -> None:
        place = self.random.randrange(len(self.names))
        self.names[place], self.names[-1] = self.names[-1], self.names[place]
        call = "free 9, cached" if self.is_cached else "free 9"
        self.timed(call, self.pool.free, self.names.pop())

    def find(self, name: int) -> None:
        tokens = tokens_of(name)
        self.timed("find 7, free, cached", self.pool.add, "again", tokens)
        self.timed("find 7, free, cached", self.pool.free, "again")

    def fork(self, name: int) -> None:
        for function, *arguments in (
            (self.pool.fork, name, "child"),
            (self.pool.append, "child"),  # takes a copy of the half full block
            (lambda: self.pool.copied(self.pool.pending_copies()),),
            (self.pool.free, "child"),
        ):
            self.timed("fork 9, append, free", function, *arguments)

    def microseconds(self, count: int) -> dict[str, float]:
        """Means over ``count`` of each call."""
        self.seconds = {}
        for _ in range(count):
            self.free()
            self.allocate()
            self.append(self.names[-1])
            name = self.random.choice(self.names)
            self.find(name) if self.is_cached else self.fork(name)
        return {call: seconds / count * 1e6 for call, seconds in self.seconds.items()}


def tokens_of(name: int) -> np.ndarray:
    return np.arange(name * PROMPT, (name + 1) * PROMPT)


def print_calls(rounds: int, count: int) -> None:
    """One row for each call, one column for each size of the pool."""
    callers = [(Caller(size, False), Caller(size, True)) for size in SIZES]
    columns = [{"make, once": plain.seconds["make"] * 1e6} for plain, _ in callers]
    found: list[list[dict[str, float]]] = [[] for _ in SIZES]
    gc.disable()  # as timeit does
    for _ in range(rounds):
        for results, (plain, cached) in zip(found, callers, strict=True):
            results.append(plain.microseconds(count) | cached.microseconds(count))
    gc.enable()
    for column, results in zip(columns, found, strict=True):
        column |= {call: statistics.median(r[call] for r in results) for call in results[0]}
    print(f"{'us a call, blocks in the pool':30}", *(f"{size:>9,}" for size in SIZES), "  growth")
    for call in columns[0]:
        us = [column[call] for column in columns]
        print(f"{call:30}", *(f"{each:9.1f}" for each in us), f"{us[-1] / us[0]:8.2f}")
    calls = list(found[0][0])
    rates = [len(calls) / sum(column[call] for call in calls) * 1e6 for column in columns]
    print(f"{'calls/s, as many of each':30}", *(f"{rate:9,.0f}" for rate in rates))


# Allocation policies


class Policy(Protocol):
    """Allocates the blocks of requests; ``blocks`` knows which are used."""

    blocks: BlockPool | BlockStates

    @property
    def allocations(self) -> int:
        """Blocks handed out so far."""

    def start(self, name: int, arrival: Arrival) -> None:
        """Gives a request the blocks of its prompt."""

    def grow(self, name: int, length: int) -> None:
        """Gives it what it lacks to hold ``length`` positions."""

    def finish(self, name: int) -> None:
        """Takes its blocks back."""


class Lowest:
    """A `BlockPool`: the lowest free block."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.pool = self.blocks = BlockPool(num_blocks, block_size)

    @property
    def allocations(self) -> int:
        return self.pool.stats().allocations

    def start(self, name: int, arrival: Arrival) -> None:
        self.pool.add(name)
        self.pool.reserve(name, arrival.prompt_tokens)

    def grow(self, name: int, length: int) -> None:
        self.pool.reserve(name, length)

    def finish(self, name: int) -> None:
        self.pool.free(name)


class LowestCached(Lowest):
    """The same with cached prompts; if no block is free, the least recently used is evicted."""

    def start(self, name: int, arrival: Arrival) -> None:
        tokens = shared_tokens(name, arrival)
        self.pool.add(name, tokens)
        self.pool.reserve(name, len(tokens))
        self.pool.commit(name, tokens, len(tokens))


class Oldest:
    """A queue of free blocks: allocates the one that has been free for longest."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.blocks = BlockStates(num_blocks)
        self.allocations = 0
        self.block_size = block_size
        self.free = deque(range(1, num_blocks))
        self.give: Callable[[int], None] = self.free.append
        self.held: dict[int, list[int]] = {}

    def start(self, name: int, arrival: Arrival) -> None:
        self.held[name] = []
        self.grow(name, arrival.prompt_tokens)

    def grow(self, name: int, length: int) -> None:
        held = self.held[name]
        while len(held) * self.block_size < length:
            held.append(self.free.popleft())
            self.blocks.use(held[-1])
            self.allocations += 1

    def finish(self, name: int) -> None:
        for block in reversed(self.held.pop(name)):
            self.blocks.release(block)
            self.give(block)


class Newest(Oldest):
    """A stack of free blocks: allocates the one that was freed last."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self.give = self.free.appendleft


POLICIES: dict[str, type[Lowest | Oldest]] = {
    "lowest first": Lowest,
    "lowest first, prompts cached": LowestCached,
    "first in, first out": Oldest,
    "last in, first out": Newest,
}


class FreeCopies:
    """Replaces a `BlockSwap`: nothing is copied."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.bytes_per_block = 1

    def move(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copies nothing."""

    def take(self, blocks: list[int]) -> list[Any]:
        """Returns nothing."""
        return []

    def put(self, blocks: list[int], contents: list[Any]) -> None:
        """Writes nothing."""


class Spread(NamedTuple):
    """What a replay found, step by step."""

    used: np.ndarray
    highest: np.ndarray
    moves: np.ndarray
    allocations: int

    def range_over_used(self) -> str:
        ratios = self.highest / self.used
        return f"{ratios.mean():9.2f} {np.percentile(ratios, 99):8.2f}"


def shared_tokens(name: int, arrival: Arrival) -> np.ndarray:
    """Token ids of a prompt, equal to those of another one exactly where the prefix ids are."""
    ids = np.array(arrival.prefix_ids, dtype=np.int64)
    shared = np.add.outer(ids * arrival.hash_block, np.arange(arrival.hash_block)).ravel()
    own = -np.arange(1, arrival.prompt_tokens + 1) - name * 2**20
    return np.concatenate([shared, own[len(shared) :]])[: arrival.prompt_tokens]


def replay(
    arrivals: list[Arrival],
    policy: Policy,
    options: argparse.Namespace,
    defragmenter: OnlineDefragmenter | None = None,
) -> Spread:
    """Serves requests as they arrive: a whole prompt in its first step, then a token a step."""
    waiting = deque(enumerate(arrivals))
    names = np.full(options.max_seqs, -1)  # of the request in each row, -1: none
    lengths, goals, held = np.zeros((3, options.max_seqs), np.int64)
    steps: list[tuple[int, int, int]] = []
    now = 0.0
    while waiting:  # a trace that was cut off would only run empty after that
        if (names < 0).all():
            now = max(now, waiting[0][1].arrival_s)
        for row in np.flatnonzero(names < 0):
            if not waiting or waiting[0][1].arrival_s > now:
                break
            names[row], arrival = waiting.popleft()
            policy.start(int(names[row]), arrival)
            lengths[row] = arrival.prompt_tokens
            goals[row] = arrival.prompt_tokens + arrival.output_tokens
            held[row] = -(-arrival.prompt_tokens // options.block_size)
        runs = names >= 0
        lengths[runs] += 1
        for row in np.flatnonzero(runs & (lengths > held * options.block_size)):
            policy.grow(int(names[row]), int(lengths[row]))
            held[row] += 1
        used, highest = policy.blocks.num_used, policy.blocks.highest_used
        for row in np.flatnonzero(runs & (lengths == goals)):
            policy.finish(int(names[row]))
            names[row] = -1
        is_due = defragmenter is not None and defragmenter.is_due
        steps.append((used, highest, defragmenter.defragment().moves if is_due else 0))
        now += options.step_ms / 1000
    return Spread(*np.array(steps).T, policy.allocations)


def print_policies(path: Path, options: argparse.Namespace) -> None:
    """One row for each policy."""
    arrivals = read_trace(path, options.limit)
    size = options.block_size
    enough = 2 + sum(-(-(a.prompt_tokens + a.output_tokens) // size) for a in arrivals)
    schedule = replay(arrivals, Lowest(enough, size), options)
    peak = int(schedule.used.max())
    num_blocks = 2 + int(peak * 1.25)
    print(f"\n# {path.name}: {len(arrivals)} requests, {len(schedule.used):,} steps,")
    print(f"# blocks of {size}: {schedule.used.mean():,.0f} in use, {peak:,} at most")
    print(f"{'':30}{'range/used':>18}{'with defragmenter':>19}{'moves per':>12}{'steps':>8}")
    print(f"{'policy':30}" + f"{'mean':>9}{'p99':>9}" * 2 + f"{'allocation':>13}{'firing':>8}")
    for name, kind in POLICIES.items():
        if kind is LowestCached and not any(a.prefix_ids for a in arrivals):
            continue
        alone = replay(arrivals, kind(num_blocks, size), options)
        policy = kind(num_blocks, size)
        defragmenter = OnlineDefragmenter(policy.blocks, FreeCopies(num_blocks))
        moved = replay(arrivals, policy, options, defragmenter)
        moves, firing = moved.moves.sum() / moved.allocations, (moved.moves > 0).mean()
        ranges = alone.range_over_used() + moved.range_over_used()
        print(f"{name:30}{ranges}{moves:13.3f}{firing:8.1%}", flush=True)


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, nargs="+", default=[FOLDER / t for t in TRACES])
    parser.add_argument("--limit", type=int, default=3000, help="requests of each trace")
    parser.add_argument("--block-size", type=int, default=128, help="of the pools of the traces")
    parser.add_argument("--max-seqs", type=int, default=256, help="requests that run at once")
    parser.add_argument("--step-ms", type=float, default=50.0, help="time from token to token")
    parser.add_argument("--rounds", type=int, default=21, help="of the calls")
    parser.add_argument("--calls", type=int, default=200, help="of each kind in a round")
    options = parser.parse_args()
    print_calls(options.rounds, options.calls)
    for path in options.trace:
        if path.is_file():
            print_policies(path, options)
        else:
            print(f"\n# {path}: skipped, no such file (--trace names others)")


if __name__ == "__main__":
    main()
