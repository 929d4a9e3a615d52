"""The server under load, compared with `transformers serve` and the same model.

    python benchmarks/serve.py [--model smollm2] [--requests 24] [--clients 8] [--rounds 2]

All servers run on this machine; all but the measured one are stopped (SIGSTOP). Clients stream
chats with prompts of about 40 tokens, each of 48 greedy tokens, a new one as soon as one ends.
Rounds alternate; medians over all requests. `transformers serve` runs with its option for
continuous batching, and with `--default` also without options: then it serves one request at a
time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime

import torch
from openai import AsyncOpenAI

from compiled_attn.errors import ModelError
from compiled_attn.models import plain_folder
from compiled_attn.serve.server import listen

TOKENS = 48
TOPICS = ["the sea", "a lighthouse", "winter", "bread", "the moon", "a clock", "rain", "an old map"]


@dataclass
class Server:
    """A server in a process of its own, and the times of its clients."""

    name: str
    command: list[str]
    model: str
    port: int
    rates: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns when it is warm."""
        self.process = subprocess.Popen(self.command, start_new_session=True)
        while not self._is_healthy():
            if self.process.poll() is not None:
                sys.exit(f"{self.name} ended with {self.process.returncode}")
            time.sleep(0.5)

    def signal(self, number: signal.Signals) -> None:
        """Sends it and its children a signal."""
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health"):
                return True
        except (urllib.error.URLError, ConnectionError):
            return False


def free_port() -> int:
    with listen("127.0.0.1", 0) as listening:
        port: int = listening.getsockname()[1]
        return port


def servers(options: argparse.Namespace) -> list[Server]:
    """Ours first, and transformers', not started."""
    ours, theirs, folder = free_port(), free_port(), str(plain_folder(options.model))
    program = "from {} import {} as main; main()"
    own = [sys.executable, "-c", program.format("compiled_attn.cli", "main"), "serve"]
    own += [options.model, "--name", "served", "--port", str(ours)]
    own += ["--max-seqs", str(options.clients), "--backend", options.backend]
    other = [sys.executable, "-c", program.format("transformers.cli.transformers", "main"), "serve"]
    other += [folder, "--host", "127.0.0.1", "--device", "cpu", "--dtype", options.dtype]
    batching = [*other, "--port", str(theirs), "--continuous-batching"]
    made = [
        Server("compiled-attn serve", [*own, "--dtype", options.dtype], "served", ours),
        Server("transformers serve --continuous-batching", batching, folder, theirs),
    ]
    if options.default:
        plain = free_port()
        command = [*other, "--port", str(plain)]
        made.append(Server("transformers serve", command, folder, plain))
    return made


async def load(server: Server, requests: int, clients: int, round_: int) -> None:
    """One round: times of every request, and requests a second."""
    numbers = iter(range(requests))

    async def one(client: AsyncOpenAI, number: int) -> None:
        topic = TOPICS[number % len(TOPICS)]
        text = f"Story {round_}-{number}: write three sentences about {topic}."
        started = time.perf_counter()
        stream = await client.chat.completions.create(
            model=server.model,
            messages=[{"role": "user", "content": text}],
            max_tokens=TOKENS,
            temperature=0,
            stream=True,
        )
        times = [
            time.perf_counter()
            async for chunk in stream
            if chunk.choices and chunk.choices[0].delta.content
        ]
        server.first.append(times[0] - started)
        server.between += [b - a for a, b in itertools.pairwise(times)]

    async def worker(client: AsyncOpenAI) -> None:
        for number in numbers:
            await one(client, number)

    started = time.perf_counter()
    url = f"http://127.0.0.1:{server.port}/v1"
    async with AsyncOpenAI(base_url=url, api_key="none", timeout=600, max_retries=0) as client:
        await asyncio.gather(*(worker(client) for _ in range(clients)))
    server.rates.append(requests / (time.perf_counter() - started))


def percentile(values: list[float], share: float) -> float:
    """In milliseconds."""
    return 1000 * sorted(values)[min(int(share * len(values)), len(values) - 1)]


def table(all_: list[Server]) -> Iterator[str]:
    yield f"{'':41}{'requests/s':>11}{'first token, ms':>22}{'between tokens, ms':>22}"
    yield f"{'':52}{'p50':>11}{'p99':>11}{'p50':>11}{'p99':>11}"
    for each in all_:
        measured = itertools.product((each.first, each.between), (0.5, 0.99))
        columns = "".join(f"{percentile(times, share):11.1f}" for times, share in measured)
        yield f"{each.name:41}{statistics.median(each.rates):11.2f}{columns}"
    ours, *theirs = (statistics.median(each.rates) for each in all_)
    for each, rate in zip(all_[1:], theirs, strict=True):
        yield f"{'over ' + each.name:46}{ours / rate:5.2f}x"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--default", action="store_true", help="their server without options too")
    options = parser.parse_args()
    try:
        all_ = servers(options)
    except ModelError as error:
        print(f"# skipped: {error}")
        return
    try:
        for server in all_:
            server.start()
            asyncio.run(load(server, 2, 2, -1))  # the first request imports modules
            server.signal(signal.SIGSTOP)
        for server in all_:
            server.rates, server.first, server.between = [], [], []
        for number in range(options.rounds):
            for server in all_:
                server.signal(signal.SIGCONT)
                asyncio.run(load(server, options.requests, options.clients, number))
                server.signal(signal.SIGSTOP)
    finally:
        for server in all_:
            server.signal(signal.SIGCONT)
            server.signal(signal.SIGKILL)
    print(
        f"# {datetime.now(UTC):%Y-%m-%d}, {platform.processor() or platform.machine()}, "
        f"{torch.get_num_threads()} threads, {options.dtype}, {options.model}, "
        f"{options.clients} clients, {options.requests} requests a round"
    )
    print("\n".join(table(all_)))


if __name__ == "__main__":
    main()
