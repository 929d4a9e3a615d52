"""The talk with a process that serves: a JSON object a line, asked on stdin, told on stdout.

Runs in every peer's environment: the standard library alone.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import TextIO

Serve = Callable[[list[list[int]], list[int]], list[list[int]]]
"""Prompts and how many tokens each generates, to those tokens."""


def answer(start: Callable[[argparse.Namespace], Serve], *packages: str) -> None:
    """Starts a system, tells its packages' versions, then serves each line until there is none."""
    out = _own_output()
    serve = start(_arguments())
    versions = {name: metadata.version(name) for name in packages}
    print(json.dumps({"versions": versions}), file=out, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        started = time.perf_counter()
        tokens = serve(asked["prompts"], asked["new"])
        seconds = time.perf_counter() - started
        print(json.dumps({"seconds": seconds, "tokens": tokens}), file=out, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--kv-bytes", type=int, required=True)
    parser.add_argument("--state", type=Path, required=True, help="what a second start finds")
    return parser.parse_args()


def _own_output() -> TextIO:
    """What was stdout; whatever else is printed goes to stderr."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return out
