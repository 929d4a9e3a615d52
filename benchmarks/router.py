"""Simulation of the router of replicas on the Mooncake trace: hit ratio and balance.

    python benchmarks/router.py [--trace FILE] [--cache-blocks 1000] [--busy 0.8]

The routers: the server's own (`PrefixRouter`), random, and round robin. A replica is simulated as
an LRU cache of blocks and a queue that computes uncached prompt tokens, one request at a time. Its
speed is such that all replicas are busy for the share ``--busy`` of the time if nothing is cached,
so each row has the same load per replica.

hits: share of prompt blocks found in the cache. balance: tokens that the busiest replica computed,
over the mean. wait: seconds from arrival to the end of the prompt, the worst 1 % and the median,
in units of the time that a replica takes for the mean prompt.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

from compiled_attn.contrib.replicas.router import PrefixRouter, RecentBlocks

TRACE = Path(__file__).parents[2] / "shared/traces/mooncake_conversation_head.jsonl"
COUNTS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Request:
    arrival: float
    tokens: int
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class Result:
    hits: float
    balance: float
    wait_median: float
    wait_p99: float


Choose = Callable[[Sequence[int]], tuple[int, Callable[[], None]]]
"""Maps the blocks of a prompt to a replica, and a callback for when it is computed."""


def read(path: Path, most: int | None = None) -> list[Request]:
    """Requests of a trace in order of arrival."""
    rows = [json.loads(line) for line in path.read_text().splitlines()[:most]]
    return [Request(row["arrival_s"], row["prompt_tokens"], tuple(row["hash_ids"])) for row in rows]


def by_prefix(replicas: int, cache_blocks: int) -> Choose:
    router = PrefixRouter(cache_blocks)
    for name in range(replicas):
        router.add(name)

    def choose(blocks: Sequence[int]) -> tuple[int, Callable[[], None]]:
        route = router.take(router.ranked(blocks)[0], blocks)
        return route.replica, lambda: router.done(route)

    return choose


def at_random(replicas: int, cache_blocks: int) -> Choose:
    rng = random.Random(0)
    return lambda blocks: (rng.randrange(replicas), lambda: None)


def in_turns(replicas: int, cache_blocks: int) -> Choose:
    turns = cycle(range(replicas))
    return lambda blocks: (next(turns), lambda: None)


ROUTERS = {"prefix": by_prefix, "random": at_random, "round robin": in_turns}


def simulate(
    requests: Sequence[Request], choose: Choose, replicas: int, cache_blocks: int, busy: float
) -> Result:
    """Send the requests to the chosen replicas at their times."""
    mean = statistics.mean(each.tokens for each in requests)
    rate = mean * len(requests) / (requests[-1].arrival * replicas * busy)  # tokens a second
    caches = [RecentBlocks(cache_blocks) for _ in range(replicas)]
    free_at, computed = [0.0] * replicas, [0.0] * replicas
    running: list[tuple[float, int, Callable[[], None]]] = []
    waits, found = [], 0
    for number, each in enumerate(requests):
        while running and running[0][0] <= each.arrival:
            heapq.heappop(running)[2]()
        at, done = choose(each.blocks)
        shared = caches[at].shared(each.blocks)
        caches[at].use(each.blocks)
        new = each.tokens * (1 - shared / len(each.blocks))
        found, computed[at] = found + shared, computed[at] + new
        free_at[at] = max(free_at[at], each.arrival) + new / rate
        waits.append((free_at[at] - each.arrival) * rate / mean)
        heapq.heappush(running, (free_at[at], number, done))
    cuts = statistics.quantiles(waits, n=100)
    blocks = sum(len(each.blocks) for each in requests)
    return Result(found / blocks, max(computed) / statistics.mean(computed), cuts[49], cuts[98])


def main(argv: Sequence[str] | None = None) -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--trace", type=Path, default=TRACE)
    options.add_argument("--cache-blocks", type=int, default=1000)
    options.add_argument("--busy", type=float, default=0.8)
    given = options.parse_args(argv)
    if not given.trace.exists():
        print(f"skipped: {given.trace} is not here; give another with --trace")
        return
    requests = read(given.trace)
    most = simulate(requests, at_random(1, 0), 1, 10**9, given.busy).hits
    print(f"{len(requests)} requests, {given.cache_blocks} cache blocks per replica; ", end="")
    print(f"one unbounded cache: hits {most:.3f}")
    print(f"{'replicas':>8}  {'router':<12}{'hits':>7}{'balance':>9}{'wait p50':>10}{'p99':>8}")
    for replicas in COUNTS:
        for name, router in ROUTERS.items():
            choose = router(replicas, given.cache_blocks)
            got = simulate(requests, choose, replicas, given.cache_blocks, given.busy)
            print(
                f"{replicas:>8}  {name:<12}{got.hits:>7.3f}{got.balance:>9.2f}"
                f"{got.wait_median:>10.2f}{got.wait_p99:>8.1f}"
            )


if __name__ == "__main__":
    main()
