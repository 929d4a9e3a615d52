"""The command with replicas, of a model whose engine fails in the process that a file names."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from compiled_attn.contrib.replicas.server import run_fleet
from compiled_attn.engine import EngineConfig
from compiled_attn.serve.server import listen
from compiled_attn.text import LLM
from tests.compiled_attn.contrib.replicas.command import LIMITS

FAILING = "failing"
"""The file in the folder of the model."""


def faulty(folder: Path, progress: Callable[[Any], None]) -> LLM:
    llm = LLM(folder, EngineConfig(backend="eager", **LIMITS), progress=progress)
    step = llm.engine.step

    def failing() -> Any:
        file = folder / FAILING
        if file.exists() and file.read_text() == str(os.getpid()):
            raise RuntimeError("a fault of the test")
        return step()

    llm.engine.step = failing
    return llm


def say(text: str) -> None:
    print(f"compiled-attn: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    folder = Path(sys.argv[2])  # after `serve`
    listening = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
    make = partial(faulty, folder)
    run_fleet("tiny", make, 2, listening, lambda: say(f"tiny at {url}"), say)
