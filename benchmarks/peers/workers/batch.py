"""Continuous batching of transformers."""

from __future__ import annotations

import argparse

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from compiled_attn.engine import EngineConfig
from compiled_attn.engine.sizing import StepSize
from compiled_attn.models import load_model
from compiled_attn.step import TableLayout
from peers.workers.protocol import Serve, answer


def generate_batch(model: PreTrainedModel, tokens: int) -> Serve:
    """`generate_batch` in steps of at most so many tokens, SDPA attention."""
    model.set_attn_implementation("sdpa")
    sizes = ContinuousBatchingConfig(
        page_size=32, num_blocks=2048, max_batch_tokens=tokens, max_requests_per_batch=32
    )
    greedy = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)

    def serve(prompts: list[list[int]], new: list[int]) -> list[list[int]]:
        found: dict[str, list[int]] = {}
        with model.continuous_batching_context_manager(
            generation_config=greedy, continuous_batching_config=sizes, block=True, timeout=5
        ) as manager:
            names = [
                manager.add_request(prompt, max_new_tokens=count)
                for prompt, count in zip(prompts, new, strict=True)
            ]
            while len(found) < len(names):
                if (result := manager.get_result(timeout=1)) is not None:
                    found[result.request_id] = result.generated_tokens
        return [found[name] for name in names]

    return serve


def start(options: argparse.Namespace) -> Serve:
    """The model as it is: nothing compiles."""
    torch.set_num_threads(options.threads)
    model = load_model(options.model, getattr(torch, options.dtype))
    serve = generate_batch(model, StepSize.of(EngineConfig(), TableLayout.symbolic).tokens)
    return torch.no_grad()(serve)


if __name__ == "__main__":
    answer(start, "transformers", "torch")
