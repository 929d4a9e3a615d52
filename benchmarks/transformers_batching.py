"""`generate_batch` of transformers with our engine and with its own: one process, in turns.

    python benchmarks/transformers_batching.py [--model smollm2] [--requests 16] [--threads 1]

Its own engine runs with both attentions that its continuous batching supports on a CPU, ``sdpa``
and ``paged|eager``. Each call starts and stops a manager; our graphs are captured before. Prints
tokens per second (medians), our speed relative to each, and whether all tokens are equal.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from compiled_attn.contrib.transformers import install
from compiled_attn.engine import EngineConfig
from compiled_attn.models import default_model, load_model

Generate = Callable[[list[list[int]], int], list[list[int]]]


def generate(model: PreTrainedModel, prompts: list[list[int]], new: int) -> list[list[int]]:
    """Greedy tokens of each prompt."""
    settings = GenerationConfig(
        max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    sizes = ContinuousBatchingConfig(
        page_size=32, num_blocks=1024, max_batch_tokens=512, max_requests_per_batch=32
    )
    answers = model.generate_batch(prompts, settings, continuous_batching_config=sizes)
    return [answer.generated_tokens for answer in answers.values()]


def systems(model: PreTrainedModel, config: EngineConfig) -> dict[str, Generate]:
    """Ours first; each has a model of the same weights."""
    theirs = {name: copy.deepcopy(model) for name in ("sdpa", "paged|eager")}
    for name, each in theirs.items():
        each.set_attn_implementation(name)

    def ours(prompts: list[list[int]], new: int) -> list[list[int]]:
        with install(config):
            return generate(model, prompts, new)

    def plain(each: PreTrainedModel) -> Generate:
        return lambda prompts, new: generate(each, prompts, new)

    return {"ours": ours, **{name: plain(each) for name, each in theirs.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a directory, or smollm2; default: a Llama of 4 layers")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=128, help="tokens")
    parser.add_argument("--tokens", type=int, default=32, help="that each request generates")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    model = load_model(options.model, dtype) if options.model else default_model(dtype=dtype)
    found = systems(model, EngineConfig(context=1024))
    generator = torch.Generator().manual_seed(0)
    seconds: dict[str, list[float]] = {name: [] for name in found}
    are_equal = True
    for number in range(options.rounds + 1):  # the first is not counted: graphs are captured in it
        shape = options.requests, options.prompt
        prompts = torch.randint(3, model.config.vocab_size, shape, generator=generator).tolist()
        names = [*found]
        texts = {}
        for name in names[number % 3 :] + names[: number % 3]:
            start = time.perf_counter()
            texts[name] = found[name](prompts, options.tokens)
            seconds[name].append(time.perf_counter() - start)
        are_equal &= all(each == texts["ours"] for each in texts.values())
    tokens = options.requests * options.tokens
    for name, each in seconds.items():
        pairs = zip(each[1:], seconds["ours"][1:], strict=True)
        over = statistics.median(it / us for it, us in pairs)
        rate = tokens / statistics.median(each[1:])
        print(f"{name:12}{rate:9.1f} tokens/s   ours is {over:.2f} as fast")
    print(f"all tokens are equal: {are_equal}")


if __name__ == "__main__":
    main()
