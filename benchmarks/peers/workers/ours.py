"""This engine, its graphs kept in a store."""

from __future__ import annotations

import argparse

import torch

from compiled_attn.cli.store import stored_backend
from compiled_attn.engine import Engine, EngineConfig, SamplingParams
from compiled_attn.models import load_model
from compiled_attn.models.hf import cache_for
from peers.workers.protocol import Serve, answer


def start(options: argparse.Namespace) -> Serve:
    """A warmed-up engine with its default sizes, but for the bytes of its cache."""
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype, torch.bfloat16)  # a type of GGUF: computed in bfloat16
    model = load_model(options.model, dtype)
    size = EngineConfig().block_size
    blocks = options.kv_bytes // (cache_for(model, 2, 1).bytes_per_block * size)
    with stored_backend("inductor", options.state / "store") as backend:
        engine = Engine(model, EngineConfig(backend=backend, num_blocks=blocks))
        engine.warmup()
    return serving(engine)


def serving(engine: Engine) -> Serve:
    """All requests at once, greedy, beyond the end of a text."""

    def serve(prompts: list[list[int]], new: list[int]) -> list[list[int]]:
        sampling = [SamplingParams(max_new_tokens=count, ignore_eos=True) for count in new]
        return [result.tokens for result in engine.generate(prompts, sampling, in_order=True)]

    return serve


if __name__ == "__main__":
    answer(start, "compiled-attn", "torch")
