"""Small engines of a tiny model, warm and without a compiler."""

from __future__ import annotations

from typing import Any

import numpy as np

from compiled_attn.engine import Engine, EngineConfig, SamplingParams
from tests.compiled_attn.tiny import plain_generate, tiny_model

SIZES = {
    "max_tokens_per_step": 24,
    "max_seqs": 4,
    "block_size": 4,
    "num_blocks": 64,
    "backend": "eager",
    "max_graphs": 4,
}


def small_engine(model: Any = None, *, grammars: Any = None, **config: Any) -> Engine:
    """A warm engine of `SIZES`, changed by ``config``."""
    settings = EngineConfig(**{**SIZES, **config})
    engine = Engine(tiny_model() if model is None else model, settings, grammars=grammars)
    engine.warmup()
    return engine


def prompts_of(
    count: int, seed: int = 0, longest: int = 60, *, vocab: int = 128
) -> list[list[int]]:
    """Random prompts, of which every second one begins with the same 16 tokens."""
    rng = np.random.default_rng(seed)
    prefix = rng.integers(1, vocab, 16).tolist()
    return [
        (prefix if index % 2 else [])
        + rng.integers(1, vocab, int(rng.integers(1, longest))).tolist()
        for index in range(count)
    ]


def greedy(engine: Engine, prompts: list[list[int]], new: int) -> list[list[int]]:
    """Greedy tokens of each prompt."""
    params = SamplingParams(max_new_tokens=new)
    return [result.tokens for result in engine.generate(prompts, params, in_order=True)]


def plain(model: Any, prompts: list[list[int]], new: int) -> list[list[int]]:
    """Greedy tokens of each prompt by `generate` of transformers."""
    return [plain_generate(model, prompt, new) for prompt in prompts]


def rest_of(engine: Engine) -> dict[int, list[int]]:
    """Steps the engine until it has no work; returns the tokens of each request."""
    tokens: dict[int, list[int]] = {}
    while engine.has_work:
        for event in engine.step():
            tokens.setdefault(event.request_id, []).append(event.token)
    return tokens
