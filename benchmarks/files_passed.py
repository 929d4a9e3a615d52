"""Lists the files of this repository that a request, a token and a bucket pass.

A request: from its submission to its first token. A token: a decode step of an engine that serves,
to the token's event. A bucket: from its definition to its captured graph. A file counts if one of
its functions runs, in any thread.

Usage: python benchmarks/files_passed.py (about a minute); exits with 1 above a limit.
"""

import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from compiled_attn.engine import Engine, EngineConfig, SamplingParams
from graphs import WarmupManager, explicit

ROOT = Path(__file__).parent.parent
PACKAGES = tuple(f"{ROOT / name}/" for name in ("graphs", "compiled_attn"))
LIMITS = {"token": 30, "bucket": 25}
SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 99}


def files_of(run: Callable[[], object]) -> Counter[str]:
    """Counts the calls of functions in each file of the packages."""
    calls: Counter[str] = Counter()

    def see(frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(PACKAGES):
            calls[name.removeprefix(f"{ROOT}/")] += 1

    threading.setprofile(see)
    sys.setprofile(see)
    try:
        assert run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return calls


def serve() -> tuple[Counter[str], Counter[str]]:
    """Serves a request to its first token, then one token more, after the warmup and another."""
    model = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **SIZES))
    engine = Engine(model.eval(), EngineConfig(32, 4, context=128, block_size=8))
    engine.warmup()
    params = SamplingParams(max_new_tokens=8)
    list(engine.generate([[1, 2, 3]], params))
    first = files_of(lambda: [engine.submit([4, 5, 6], params), engine.step()][1])
    return first, files_of(engine.step)


def capture() -> object:
    """Captures one bucket."""
    space = explicit(["tokens"], [4])
    inputs = [torch.zeros(4)]
    return WarmupManager(torch.relu, space, lambda _: inputs).warmup().captured


if __name__ == "__main__":
    first, token = serve()
    found = {"request": first, "token": token, "bucket": files_of(capture)}
    for name, calls in found.items():
        limit = f" (limit {LIMITS[name]})" if name in LIMITS else ""
        print(f"a {name} passes {len(calls)} files{limit}; calls into each:")
        print(*(f"  {calls[file]:5} {file}" for file in sorted(calls)), "", sep="\n")
    sys.exit(any(len(found[name]) > limit for name, limit in LIMITS.items()))
