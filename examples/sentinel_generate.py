"""A late recompile of transformers' `generate`, named with its cause.

    python examples/sentinel_generate.py [--backend inductor]

The layer of a small random Llama is compiled, as Hugging Face recommends for each layer of a large
one. The warmup has a prompt of 8 tokens; a longer one compiles while it is served. Padded to 8, it
would not. (Of several graphs of a function, the cause is about the one that was compiled last.)
"""

from __future__ import annotations

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from graphs import GraphBudgetExceeded, no_compile


def small_llama(backend: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    for layer in model.model.layers:
        layer.compile(backend=backend, dynamic=False)
    return model


def answer(model: LlamaForCausalLM, length: int) -> None:
    prompt = torch.arange(1, length + 1)[None]
    model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        cache_implementation="static",
        disable_compile=True,  # of the whole forward: the layers are compiled
        max_cache_len=32,
        max_new_tokens=1,
        do_sample=False,
        pad_token_id=0,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="eager", help="of torch.compile")
    model = small_llama(parser.parse_args().backend)
    for _ in range(2):  # the second call has the state of all later ones
        answer(model, 8)

    with no_compile() as sentinel:
        answer(model, 8)
    print(f"prompt of 8: {sentinel.compiles} compiles")

    try:
        with no_compile():
            answer(model, 11)
    except GraphBudgetExceeded as error:
        print(f"prompt of 11: {error.event}")
        print(f"remedy: {error.event.remedy}")


if __name__ == "__main__":
    main()
