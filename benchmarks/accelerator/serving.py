"""Tokens a second of a Llama with random weights on a device, with and without graphs."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from compiled_attn.engine import Engine, EngineConfig, SamplingParams


def llama(is_small: bool, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """About 1.2 billion parameters (the sizes of Llama 3.2 1B), or next to none."""
    config = LlamaConfig(
        vocab_size=512 if is_small else 128256,
        hidden_size=64 if is_small else 2048,
        intermediate_size=96 if is_small else 8192,
        num_hidden_layers=2 if is_small else 16,
        num_attention_heads=4 if is_small else 32,
        num_key_value_heads=2 if is_small else 8,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    with torch.device(device):
        return LlamaForCausalLM(config).to(dtype).eval().requires_grad_(False)


class Served(NamedTuple):
    """What a backend came to; ``speed``: tokens a second, ``steps``: of the engine."""

    backend: str
    speed: float
    warmup_seconds: float
    kernel: str
    notes: dict[str, str]
    graphs: int
    steps: int
    steps_ahead: int
    compiles_after_warmup: int


def row(model: PreTrainedModel, backend: str, is_small: bool) -> Served:
    """The tokens a second of a backend, after its warmup."""
    requests, length, new = (3, 9, 4) if is_small else (64, 512, 128)
    chance = torch.Generator().manual_seed(0)
    shape = requests, length
    prompts = torch.randint(1, 500, shape, generator=chance).tolist()
    config = EngineConfig(
        max_tokens_per_step=64 if is_small else 2048,
        max_seqs=requests,
        context=length + new + 64,  # blocks to look ahead with until the end
        block_size=16,
        backend=backend,
        max_graphs=4 if is_small else 6,  # of each, some tiles are compiled and measured
        prefix_key=b"benchmark",
    )
    engine = Engine(model, config)
    warm = engine.warmup().elapsed_seconds
    list(engine.generate(prompts[:2], SamplingParams(max_new_tokens=2)))
    started = time.perf_counter()
    results = [*engine.generate(prompts, SamplingParams(max_new_tokens=new))]
    spent = time.perf_counter() - started
    tokens = sum(len(result.tokens) for result in results)
    report = engine.report()
    return Served(
        backend,
        tokens / spent,
        warm,
        report.kernel,
        report.kernel_notes,
        report.graphs,
        report.steps,
        report.steps_ahead,
        report.compiles_after_warmup,
    )
