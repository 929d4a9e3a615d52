"""Tokens a second of one drawn Llama: this engine, transformers, vLLM, SGLang, where installed."""

from __future__ import annotations

import gc
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from accelerator.shares import shares
from compiled_attn.engine import Engine, EngineConfig, SamplingParams

__all__ = ["MODELS", "Load", "Shape", "compare", "draw"]

Prompts = list[list[int]]
Generate = Callable[[Prompts, int], int]
"""Generates so many tokens for each prompt; returns how many it generated in all."""


class Shape(NamedTuple):
    """Sizes of a Llama; all heads are of 128, or 64 for the 1 B."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    tied: bool


MODELS = {
    "1b": Shape(2048, 8192, 16, 32, 8, 128256, True),
    "8b": Shape(4096, 14336, 32, 32, 8, 128256, False),
    "tiny": Shape(64, 96, 2, 4, 2, 512, True),
}


class Load(NamedTuple):
    """Requests, tokens of a prompt, and new tokens of each."""

    requests: int
    prompt: int
    new: int


def config_of(shape: Shape) -> LlamaConfig:
    """Its configuration, as Llama 3's."""
    return LlamaConfig(
        vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=shape.inner,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads, max_position_embeddings=8192, rope_theta=500000.0,
        tie_word_embeddings=shape.tied, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip


def draw(shape: Shape, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """A model with random weights."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # 8 B of float32 would be twice the memory
    try:
        with torch.device(device):
            return LlamaForCausalLM(config_of(shape)).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(before)


@contextmanager
def ours(model: PreTrainedModel, load: Load, backend: str) -> Iterator[Generate]:
    """This engine, warmed up."""
    config = EngineConfig(
        max_tokens_per_step=min(2048, load.requests * load.prompt), max_seqs=load.requests,
        context=load.prompt + load.new + 64, block_size=16, backend=backend, max_graphs=6,
        prefix_key=b"benchmark",
    )  # fmt: skip
    engine = Engine(model, config)
    engine.warmup()

    def generate(prompts: Prompts, new: int) -> int:
        params = SamplingParams(max_new_tokens=new, ignore_eos=True)
        return sum(len(result.tokens) for result in engine.generate(prompts, params))

    yield generate


@contextmanager
def batching(model: PreTrainedModel, load: Load, _: str) -> Iterator[Generate]:
    """Continuous batching of transformers: `generate_batch`."""
    page = 32
    pages = -(-(load.prompt + load.new) // page) + 1
    sizes = ContinuousBatchingConfig(
        page_size=page, num_blocks=load.requests * pages + 8,
        max_batch_tokens=min(2048, load.requests * load.prompt),
        max_requests_per_batch=load.requests,
    )  # fmt: skip

    def generate(prompts: Prompts, new: int) -> int:
        settings = GenerationConfig(
            max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        answers = model.generate_batch(prompts, settings, continuous_batching_config=sizes)
        return sum(len(answer.generated_tokens) for answer in answers.values())

    yield generate


@contextmanager
def vllm(model: PreTrainedModel, load: Load, _: str) -> Iterator[Generate]:
    """vLLM with the same configuration and random weights of its own."""
    from vllm import LLM  # type: ignore[import-not-found]
    from vllm import SamplingParams as Params

    with _saved_config(model) as folder:
        engine = LLM(
            folder, load_format="dummy", skip_tokenizer_init=True, gpu_memory_utilization=0.6,
            max_model_len=load.prompt + load.new + 64, dtype=str(model.dtype).split(".")[1],
            enable_prefix_caching=False,
        )  # fmt: skip

        def generate(prompts: Prompts, new: int) -> int:
            params = Params(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
            asked = [{"prompt_token_ids": prompt} for prompt in prompts]
            results = engine.generate(asked, params, use_tqdm=False)
            return sum(len(result.outputs[0].token_ids) for result in results)

        yield generate


@contextmanager
def sglang(model: PreTrainedModel, load: Load, _: str) -> Iterator[Generate]:
    """SGLang with the same configuration and random weights of its own."""
    import sglang as sgl  # type: ignore[import-not-found]

    with _saved_config(model) as folder:
        engine = sgl.Engine(
            model_path=folder, load_format="dummy", skip_tokenizer_init=True,
            mem_fraction_static=0.6, disable_radix_cache=True,
            dtype=str(model.dtype).split(".")[1],
        )  # fmt: skip

        def generate(prompts: Prompts, new: int) -> int:
            params = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
            results = engine.generate(input_ids=prompts, sampling_params=params)
            return sum(len(result["output_ids"]) for result in results)

        try:
            yield generate
        finally:
            engine.shutdown()


SYSTEMS: dict[str, Any] = {
    "ours": ours, "generate_batch": batching, "vllm": vllm, "sglang": sglang,
}  # fmt: skip
_PACKAGES = "vllm", "sglang"


def compare(
    name: str, load: Load, backend: str, dtype: torch.dtype, device: torch.device, rounds: int = 2
) -> dict[str, Any]:
    """Tokens a second of each system on a drawn model, one after the other, and shares of ours.

    The first run of each is not counted; of the others the fastest is.
    """
    shape = MODELS[name]
    model = draw(shape, dtype, device)
    found: dict[str, Any] = {"model": name, "load": load._asdict(), "speeds": {}, "skipped": {}}
    for system, opened in SYSTEMS.items():
        if system in _PACKAGES and find_spec(system) is None:
            found["skipped"][system] = "not installed"
            continue
        try:
            with opened(model, load, backend) as generate:
                found["speeds"][system] = _speed(generate, load, shape.vocab, rounds)
                if system == "ours":
                    prompts = _prompts(load, shape.vocab, rounds + 1)
                    found["shares"] = shares(lambda: generate(prompts, load.new), device)  # noqa: B023
        except Exception as error:  # the others are still measured
            found["skipped"][system] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        generate = None
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return found


def _speed(generate: Generate, load: Load, vocab: int, rounds: int) -> float:
    best = 0.0
    for number in range(rounds + 1):
        prompts = _prompts(load, vocab, number)
        started = time.perf_counter()
        tokens = generate(prompts, load.new)
        if number:
            best = max(best, tokens / (time.perf_counter() - started))
    return best


def _prompts(load: Load, vocab: int, seed: int) -> Prompts:
    """Other prompts each time: no prefix is found in a cache."""
    chance = torch.Generator().manual_seed(seed)
    shape = load.requests, load.prompt
    return torch.randint(3, vocab, shape, generator=chance).tolist()


@contextmanager
def _saved_config(model: PreTrainedModel) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        values = {**model.config.to_dict(), "architectures": ["LlamaForCausalLM"]}
        with open(f"{folder}/config.json", "w") as file:
            json.dump(values, file)
        yield folder
