"""Calls of replicas on Ray by three ways: plain actors, a deployment of Ray Serve, its HTTP proxy.

    python benchmarks/ray_serve.py     (needs `pip install 'compiled-attn[ray]' 'ray[serve]'`)

Two replicas stream chunks that cost nothing, so what is timed is the way to them. With Serve a
request router of ours chooses the replica; the proxy has one ingress behind it, which reads the
body and asks that router, as the proxy itself sees the head of a request alone. Each way is a Ray
of its own: how long it took to start, the first chunk and the whole of a call, medians in ms.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from statistics import median
from typing import Any

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import RequestRouter

WAYS = ("actors", "handle", "proxy")
AT_ONCE, PORT = 4096, 8123

Call = Callable[[int, int], AsyncIterator[Any]]


class Replica:
    """Streams so many chunks; the key is for the router."""

    async def answer(self, key: int, count: int) -> AsyncIterator[bytes]:
        for _ in range(count):
            yield b"data: x" * 10


class ByKey(RequestRouter):
    """Prefers the same replica for the same key."""

    async def choose_replicas(self, candidate_replicas: list, pending_request: Any = None) -> list:
        key = pending_request.args[0] if pending_request else 0
        return [
            [each]
            for each in sorted(candidate_replicas, key=lambda one: hash((str(one.replica_id), key)))
        ]


class Ingress:
    """Reads a request and asks a replica."""

    def __init__(self, handle: Any) -> None:
        self._answer = handle.options(stream=True, method_name="answer")

    async def __call__(self, request: Any) -> Any:
        from starlette.responses import StreamingResponse

        asked = json.loads(await request.body())
        return StreamingResponse(self._answer.remote(asked["key"], asked["count"]))


def actors() -> Call:
    replica = ray.remote(Replica).options(max_concurrency=AT_ONCE, num_cpus=1)
    every = [replica.remote() for _ in range(2)]

    async def call(key: int, count: int) -> AsyncIterator[Any]:
        answer = every[key % 2].answer.options(num_returns="streaming").remote(key, count)
        async for chunk in answer:
            yield await chunk

    return call


def deployed() -> Any:
    router = RequestRouterConfig(request_router_class=ByKey)
    how: dict[str, Any] = {"max_ongoing_requests": AT_ONCE, "ray_actor_options": {"num_cpus": 1}}
    return serve.deployment(num_replicas=2, request_router_config=router, **how)(Replica).bind()


def handle() -> Call:
    serve.start(proxy_location="Disabled")
    answer = serve.run(deployed(), route_prefix=None).options(stream=True, method_name="answer")

    async def call(key: int, count: int) -> AsyncIterator[Any]:
        async for chunk in answer.remote(key, count):
            yield chunk

    return call


def proxy() -> Call:
    serve.start(proxy_location="HeadOnly", http_options={"port": PORT})
    how: dict[str, Any] = {"max_ongoing_requests": AT_ONCE, "ray_actor_options": {"num_cpus": 0}}
    serve.run(serve.deployment(**how)(Ingress).bind(deployed()), route_prefix="/")

    async def call(key: int, count: int) -> AsyncIterator[Any]:
        import aiohttp

        body = json.dumps({"key": key, "count": count})
        url = f"http://127.0.0.1:{PORT}/"
        async with aiohttp.ClientSession() as client, client.post(url, data=body) as answer:
            async for chunk in answer.content.iter_any():
                yield chunk

    return call


async def times(way: str, call: Call) -> None:
    for count, at_once, calls in ((1, 1, 200), (1, 32, 200), (50, 32, 64)):
        firsts: list[float] = []
        wholes: list[float] = []
        room = asyncio.Semaphore(at_once)

        async def one(key: int, count: int = count) -> None:
            async with room:  # noqa: B023
                begun, first = time.perf_counter(), 0.0
                async for _ in call(key, count):
                    first = first or time.perf_counter() - begun
                firsts.append(first)  # noqa: B023
                wholes.append(time.perf_counter() - begun)  # noqa: B023

        await asyncio.gather(*map(one, range(16)))
        firsts.clear(), wholes.clear()
        await asyncio.gather(*map(one, range(calls)))
        print(
            f"{way:7}, {count:2} chunks, {at_once:2} at once: first {median(firsts) * 1e3:6.1f}, "
            f"whole {median(wholes) * 1e3:6.1f} ms",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--way", choices=WAYS)
    way = parser.parse_args().way
    if way is None:
        for each in WAYS:
            subprocess.run([sys.executable, __file__, "--way", each], check=True)
        return
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    begun = time.perf_counter()
    call = {"actors": actors, "handle": handle, "proxy": proxy}[way]()

    async def run() -> None:
        async for _ in call(0, 1):
            break
        print(f"{way:7}, first answer {time.perf_counter() - begun:.1f} s after Ray", flush=True)
        await times(way, call)

    asyncio.run(run())


if __name__ == "__main__":
    main()
