"""Calls of replicas on Ray: plain actors, and the Ray Serve deployment of `serve --replicas`.

    python benchmarks/ray_serve.py [--rounds 3]     (needs `pip install '.[ray]'`)

Two replicas stream constant chunks, so only the call path is timed: for the deployment a handle and
the request router by prefix. Each path has its own Ray, alternately: seconds from Ray's start to
the first response, then the first chunk and the whole of a call, medians in ms.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from itertools import cycle
from statistics import median
from typing import Any

import ray

from compiled_attn.contrib.replicas.deployment import MAX_REQUESTS, deploy

WAYS = ("actors", "serve")

Call = Callable[[int, int], AsyncIterator[Any]]


class Replica:
    """Streams as many chunks as the body says."""

    async def answer(self, scope: dict[str, Any], body: bytes) -> AsyncIterator[bytes]:
        for _ in range(json.loads(body)["count"]):
            yield b"data: x" * 10


def request(key: int, count: int) -> tuple[dict[str, Any], bytes]:
    prompt = f"{key} " * 200
    return {"headers": []}, json.dumps({"prompt": prompt, "count": count}).encode()


@contextmanager
def actors() -> Iterator[Call]:
    replica = ray.remote(Replica).options(max_concurrency=MAX_REQUESTS, num_cpus=1)
    every = cycle([replica.remote() for _ in range(2)])

    async def call(key: int, count: int) -> AsyncIterator[Any]:
        answer = next(every).answer.options(num_returns="streaming")
        async for chunk in answer.remote(*request(key, count)):
            yield await chunk

    yield call


@contextmanager
def deployment() -> Iterator[Call]:
    with deploy(Replica, (), 2, cpus=1, gpus=0) as handle:
        answer = handle.options(stream=True, method_name="answer")

        async def call(key: int, count: int) -> AsyncIterator[Any]:
            async for chunk in answer.remote(*request(key, count)):
                yield chunk

        yield call


async def times(way: str, call: Call) -> None:
    for count, at_once, calls in ((1, 1, 200), (1, 32, 200), (50, 1, 32), (50, 32, 64)):
        starts: list[float] = []
        wholes: list[float] = []
        room = asyncio.Semaphore(at_once)

        async def one(key: int, count: int = count) -> None:
            async with room:  # noqa: B023
                begun, first = time.perf_counter(), 0.0
                async for _ in call(key, count):
                    first = first or time.perf_counter() - begun
                starts.append(first)  # noqa: B023
                wholes.append(time.perf_counter() - begun)  # noqa: B023

        await asyncio.gather(*map(one, range(16)))
        starts.clear(), wholes.clear()
        await asyncio.gather(*map(one, range(calls)))
        print(
            f"{way:6}, {count:2} chunks, {at_once:2} at once: first {median(starts) * 1e3:6.1f}, "
            f"whole {median(wholes) * 1e3:6.1f} ms",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--way", choices=WAYS, help="this one, once, in this process")
    given = parser.parse_args()
    if given.way is None:
        for way in WAYS * given.rounds:
            subprocess.run([sys.executable, __file__, "--way", way], check=True)
        return
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    begun = time.perf_counter()
    with {"actors": actors, "serve": deployment}[given.way]() as call:

        async def run() -> None:
            async for _ in call(0, 1):
                pass
            took = time.perf_counter() - begun
            print(f"{given.way:6}, first response {took:.1f} s after Ray", flush=True)
            await times(given.way, call)

        asyncio.run(run())


if __name__ == "__main__":
    main()
