"""Prints the time from a process's start to its first answer: `python benchmarks/start.py`.

Three starts of one model, each a process of its own: cold (empty caches: GGUF conversion, kernels,
compile), second (from what the first has cached), and from a bundle (`LLM`, and the server over
HTTP). Wall and processor time; medians of --rounds, of the cold start one. Needs a quiet machine:
processes that compute next to it take their time.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

_CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
_ANSWER = """
from compiled_attn import LLM
from compiled_attn.engine import SamplingParams
with LLM({arguments}, progress=False) as llm:
    llm.chat({{"role": "user", "content": "Hi"}}, SamplingParams(max_new_tokens=1))
"""


def first_answer(arguments: str, environment: Mapping[str, str]) -> None:
    """Runs a process that answers once; includes its exit."""
    code = _ANSWER.format(arguments=arguments)
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def first_response(bundle: Path, environment: Mapping[str, str]) -> None:
    """Starts a server, waits for its first answer, and ends it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "compiled_attn", "serve", "--bundle", str(bundle)]
    with subprocess.Popen(
        [*command, "--port", str(port)], env=environment, stderr=subprocess.DEVNULL
    ) as server:
        try:
            while not _is_answered(port):
                if server.poll() is not None:
                    raise SystemExit(f"the server ended with {server.returncode}")
                time.sleep(0.05)
        finally:
            server.kill()


def _is_answered(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(_CHAT), headers)
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def timed(start: Callable[[], None], rounds: int) -> str:
    """Median wall and processor seconds of a start."""
    walls, processors = [], []
    for _ in range(rounds):
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        start()
        walls.append(time.perf_counter() - began)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        processors.append(used)
    return f"{statistics.median(walls):6.2f} s, processor {statistics.median(processors):6.2f} s"


def main() -> None:
    """Print a line for each start."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bundle", type=Path, help="measure this bundle alone")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "XDG_CACHE_HOME": folder,
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
        }
        bundle = options.bundle
        if bundle is None:
            model = repr(options.model)
            cold = timed(lambda: first_answer(model, environment), 1)
            print(f"cold start            {cold}", flush=True)
            second = timed(lambda: first_answer(model, environment), options.rounds)
            print(f"second start          {second}", flush=True)
            bundle = Path(folder, "bundle")
            command = [sys.executable, "-m", "compiled_attn", "bundle", options.model]
            subprocess.run([*command, "--out", str(bundle)], env=environment, check=True)
        arguments = f"bundle={str(bundle)!r}"
        opened = timed(lambda: first_answer(arguments, environment), options.rounds)
        print(f"bundle                {opened}", flush=True)
        served = timed(lambda: first_response(bundle, environment), options.rounds)
        print(f"bundle, over HTTP     {served}")


if __name__ == "__main__":
    main()
