"""examples/nano_vllm.py with and without capture and the op, interleaved in one process.

    python benchmarks/nano.py [--model smollm2] [--tokens 32] [--rounds 5]

The same engine runs three times: as it is; without capture; and with attention in plain torch,
which gathers the blocks of each text for SDPA. Prints lines, median tokens per second, and the
share of the first.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "nano_vllm.py"
sys.path.insert(0, str(EXAMPLE.parent))
from nano_vllm import BLOCK, NanoEngine, prompts_for  # noqa: E402

from compiled_attn.models import default_model, load_model  # noqa: E402
from compiled_attn.step import TableBatch  # noqa: E402


def attend_gathered(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, step: TableBatch
):
    """Attention in plain torch, which cannot be captured: its shapes depend on lengths."""
    for cache, new in ((keys, k), (values, v)):
        cache.flatten(0, 1)[step.slot_mapping] = new
    out, starts = torch.zeros_like(q), step.query_start_loc.tolist()
    for row, length in enumerate(step.seq_lens.tolist()):
        own, blocks = slice(*starts[row : row + 2]), step.block_tables[row]
        used = blocks[: -(-length // BLOCK)].long()
        key, value = (
            cache[used].flatten(0, 1)[:length].transpose(0, 1) for cache in (keys, values)
        )
        queries = q[own].transpose(0, 1)
        before = torch.ones(queries.shape[1], length, dtype=torch.bool).tril(
            length - queries.shape[1]
        )
        out[own] = F.scaled_dot_product_attention(
            queries[None], key[None], value[None], before, enable_gqa=True
        )[0].transpose(0, 1)
    return out


def measure(model: Any, backend: str, new: int, rounds: int) -> None:
    """Serves rounds of equal prompts with each engine, in rotating order."""
    engines = {
        f"op, captured by {backend}": NanoEngine(model, backend=backend),
        "op, not captured": NanoEngine(model, backend="eager"),
        "gathered for SDPA": NanoEngine(model, backend="eager", attend=attend_gathered),
    }
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    texts: dict[str, list[list[list[int]]]] = {name: [] for name in engines}
    for number in range(rounds + 1):  # the first is not counted
        prompts = [[3 + number, *prompt] for prompt in prompts_for(model)]  # nothing is cached
        names = [*engines]
        for name in names[number % 3 :] + names[: number % 3]:
            start = time.perf_counter()
            texts[name].append(engines[name].generate(prompts, new))
            seconds[name].append(time.perf_counter() - start)
    own, *others = texts.values()
    tokens = sum(len(text) for text in own[0])
    best, *_ = medians = [sorted(each[1:])[rounds // 2] for each in seconds.values()]
    for name, each in zip(engines, medians, strict=True):
        print(f"{name:32} {tokens / each:8.1f} tokens/s {best / each:6.2f}")
    print(f"{tokens} tokens a round, all texts are equal: {all(each == own for each in others)}")


def lines() -> int:
    """Counts the lines of the example that are not blank."""
    return sum(bool(line.strip()) for line in EXAMPLE.read_text().splitlines())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a directory with a Llama or Qwen 3, or smollm2")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--tokens", type=int, default=24, help="of each text")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    model = load_model(options.model, dtype) if options.model else default_model(dtype=dtype)
    print(f"{EXAMPLE.name}: {lines()} lines that are not blank")
    measure(model, options.backend, options.tokens, options.rounds)


if __name__ == "__main__":
    main()
