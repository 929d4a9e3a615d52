"""Batched greedy generation over a paged KV cache, around one attention call.

    python examples/paged_generation.py [--block-size 16] [--tokens 24]

Prompts of different lengths start together; each text ends at its own end-of-sequence token and
frees its blocks (sequence_blocks.py). The model is a random Llama of 4 layers. Each text is
compared with that of a loop over a contiguous cache.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from sequence_blocks import SequenceBlocks
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from compiled_attn import PagedKVCache, flash_attn_with_kvcache
from compiled_attn.cache.blocks import BlockPool
from compiled_attn.models import default_model

LENGTHS = 5, 48, 17, 32  # of the prompts; two are whole blocks of 16
END = 256  # random weights have no end of sequence: treat every token below this as one
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


def logits_of(model: Any, tokens: Tensor, attend: Attend) -> Tensor:
    """A Llama around ``attend(layer, q, k, v)``: ``[B, S]`` -> ``[B, S, vocabulary]``."""
    x = model.model.embed_tokens(tokens)
    for number, layer in enumerate(model.model.layers):
        attention, normed = layer.self_attn, layer.input_layernorm(x)
        projections = attention.q_proj, attention.k_proj, attention.v_proj
        q, k, v = (each(normed).unflatten(-1, (-1, attention.head_dim)) for each in projections)
        x = x + attention.o_proj(attend(number, q, k, v).flatten(-2))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return model.lm_head(model.model.norm(x))


def rotary_of(model: Any) -> dict[str, Any]:
    """Cosines and sines ``[R, D / 2]``; Llama rotates element i with element i + D / 2."""
    positions = torch.arange(model.config.max_position_embeddings).unsqueeze(0)
    cos, sin = (t[0].chunk(2, -1)[0] for t in model.model.rotary_emb(torch.ones(1), positions))
    tables = {"rotary_cos": cos.contiguous(), "rotary_sin": sin.contiguous()}
    return {**tables, "rotary_interleaved": False}


@torch.no_grad()
def generate(model: Any, prompts: list[Tensor], cache: PagedKVCache, new: int) -> list[list[int]]:
    """Generates at most ``new`` tokens for all prompts at once, over a paged cache."""
    pool, rotary = BlockPool(cache.num_blocks, cache.block_size), rotary_of(model)
    blocks = SequenceBlocks(pool, [len(prompt) for prompt in prompts])
    texts: list[list[int]] = [[] for _ in prompts]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        pages = cache.key_blocks(layer), cache.value_blocks(layer)
        where = {"cache_seqlens": before, "block_table": table}
        return flash_attn_with_kvcache(q, *pages, k, v, **where, causal=True, **rotary)

    # The first step computes whole prompts. Padding on the right is written to slots that later
    # tokens overwrite, or to the null block; no token of a prompt sees it.
    tokens = pad_sequence(prompts, batch_first=True)
    before = torch.zeros(len(prompts), dtype=torch.int32)  # tokens in the cache
    newest = blocks.last_positions()  # their index in `tokens`
    while blocks.running.any():
        table = blocks.block_table()
        logits = logits_of(model, tokens, attend)
        chosen = logits[torch.arange(len(prompts)), newest].argmax(-1)
        for row in blocks.running.nonzero().flatten().tolist():
            texts[row].append(int(chosen[row]))
        is_longest = max(map(len, texts)) == new
        blocks.update((chosen < END) | is_longest)  # finished texts free their blocks
        tokens, before, newest = chosen.unsqueeze(1), blocks.last_positions(), newest * 0
    blocks.free()
    return texts


@torch.no_grad()
def generate_contiguous(model: Any, prompt: Tensor, new: int) -> list[int]:
    """The same for one prompt, over a contiguous cache."""
    config, rotary = model.config, rotary_of(model)
    sizes = 2, 1, len(prompt) + new, config.num_key_value_heads, config.head_dim
    caches = torch.zeros(config.num_hidden_layers, *sizes)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        where = {"cache_seqlens": before, "causal": True}
        return flash_attn_with_kvcache(q, *caches[layer], k, v, **where, **rotary)

    tokens, before, text = prompt.unsqueeze(0), 0, []
    while True:
        chosen = logits_of(model, tokens, attend)[0, -1].argmax()
        text.append(int(chosen))
        if chosen < END or len(text) == new:
            return text
        tokens, before = chosen.view(1, 1), before + tokens.shape[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=24, help="at most, of each text")
    options = parser.parse_args()
    model = default_model()
    config, size = model.config, options.block_size
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(config.vocab_size, (n,), generator=generator) for n in LENGTHS]
    num_blocks = 1 + sum(-(-(n + options.tokens) // size) for n in LENGTHS)
    shape = config.num_hidden_layers, num_blocks, size, config.num_key_value_heads, config.head_dim
    texts = generate(model, prompts, PagedKVCache(*shape), options.tokens)
    for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        is_same = text == generate_contiguous(model, prompt, options.tokens)
        print(f"prompt {row}, {len(prompt)} tokens: {text}")
        print(f"  {len(text)} tokens, the same as over a contiguous cache: {is_same}")


if __name__ == "__main__":
    main()
