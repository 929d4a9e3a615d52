"""vLLM's offline `LLM` in its own environment: greedy tokens as a line of JSON, last on stdout.

VLLM_PYTHON tests/vllm_backend/generate.py MODEL '{"dtype": "float32"}' PROMPTS_JSON NEW
"""

from __future__ import annotations

import json
import sys


def main() -> None:
    from vllm import LLM, SamplingParams
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    folder, options, prompts, new = sys.argv[1], *map(json.loads, sys.argv[2:5])
    defaults = {"kv_cache_memory_bytes": 2**28, "enforce_eager": True, "skip_tokenizer_init": True}
    llm = LLM(folder, **{**defaults, **options})
    sampling = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    # The second time prompts are found in the cache.
    rounds = [llm.generate(requests, sampling, use_tqdm=False) for _ in range(2)]
    rounds_of_tokens = [[[*each.outputs[0].token_ids] for each in results] for results in rounds]
    print(
        json.dumps(
            {"backend": AttentionBackendEnum.CPU_ATTN.get_path(), "rounds": rounds_of_tokens}
        )
    )


if __name__ == "__main__":
    main()
