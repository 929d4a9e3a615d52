"""Generated tokens per second by the packing of the weights, see ``--weights``.

    python benchmarks/weights.py [--model smollm2] [--threads 1] [--requests 16] [--new 64]

One engine per packing over the same bfloat16 checkpoint, inductor backend, greedy, prompts of 128
random tokens. One process, in turns, medians; compile and warmup are excluded. Also prints the
bytes of all weights, and the number of tokens equal to those of plain weights.
"""

from __future__ import annotations

import argparse

import torch
from native.timing import medians

from compiled_attn.engine import Engine, EngineConfig, SamplingParams
from compiled_attn.models import load_model, plain_folder
from graphs import explicit

PACKINGS = ("plain", "packed", "int8", "int4", "w8a16", "w4a16")
PROMPT = 128


class PackedEngine:
    """An engine with one packing, and the tokens of its last round."""

    def __init__(self, packing: str, options: argparse.Namespace) -> None:
        self._options = options
        self._model = load_model(str(plain_folder(options.model)), dtype=torch.bfloat16)
        buckets = explicit(("tokens", "requests"), [(16, 16), (512, 32)])
        config = EngineConfig(weights=packing, buckets=buckets, max_tokens_per_step=512)
        self._engine = Engine(self._model, config)
        self._engine.warmup()
        self.tokens: list[list[int]] = []

    def bytes(self) -> int:
        """Bytes of all weights."""
        tensors = {t.data_ptr(): t for t in (*self._model.parameters(), *self._model.buffers())}
        return sum(t.numel() * t.itemsize for t in tensors.values())

    def serve(self, number: int) -> None:
        """Requests that no earlier round has cached."""
        generator = torch.Generator().manual_seed(number)
        shape = self._options.requests, PROMPT
        prompts = torch.randint(100, 10_000, shape, generator=generator).tolist()
        params = SamplingParams(max_new_tokens=self._options.new, ignore_eos=True)
        self.tokens = [result.tokens for result in self._engine.generate(prompts, params)]


def same_tokens(ours: list[list[int]], others: list[list[int]]) -> int:
    """Number of tokens before the first one of each request that differs."""
    count = 0
    for pair in zip(ours, others, strict=True):
        for one, other in zip(*pair, strict=True):
            if one != other:
                break
            count += 1
    return count


def main() -> None:
    """Print a row per packing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    engines = {packing: PackedEngine(packing, options) for packing in PACKINGS}
    times = medians({packing: each.serve for packing, each in engines.items()}, options.rounds)
    plain = engines["plain"].tokens
    print(f"# {options.requests} x ({PROMPT} + {options.new}), {options.threads} threads, bfloat16")
    for packing, each in engines.items():
        same = same_tokens(each.tokens, plain)
        print(
            f"{packing:8}{times[packing]:8.2f} s {times['plain'] / times[packing]:6.2f} over plain "
            f"{each.bytes() / 2**20:8.1f} MiB {same:6} of {options.requests * options.new} tokens"
        )


if __name__ == "__main__":
    main()
