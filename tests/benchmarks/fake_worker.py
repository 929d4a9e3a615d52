"""A system that serves nothing but a number: `fake_worker.py NUMBER [--fails-at N] [options]`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

from peers.workers.protocol import Serve, answer


def start(number: int, fails_at: int) -> Callable[[object], Serve]:
    def started(_: object) -> Serve:
        print("what a library prints")
        if not fails_at:
            raise ValueError("there is no such model")
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        served: list[int] = []

        def serve(prompts: list[list[int]], new: list[int]) -> list[list[int]]:
            served.append(len(prompts))
            if len(served) == fails_at:
                raise MemoryError("too many requests")
            return [
                [prompt[-1] + number] * count for prompt, count in zip(prompts, new, strict=True)
            ]

        return serve

    return started


if __name__ == "__main__":
    number, fails_at = int(sys.argv.pop(1)), int(sys.argv.pop(1))
    answer(start(number, fails_at), "pytest")
