"""One mixed step: two decodes that share a prefix, and a prompt chunk, in one call.

    python examples/unified_step.py

Every request is compared with dense float64 attention over its own tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_attn import BatchBuilder, PagedKVCache, Request, unified_attention

BLOCK, HEADS, KV_HEADS, DIM = 4, 4, 2, 16
SCALE = DIM**-0.5


def dense(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Causal attention of the last tokens of one sequence in float64: ``[n, H, D]``."""
    query, keys, values = query.double(), keys.double(), values.double()
    keys = keys.repeat_interleave(HEADS // KV_HEADS, 1)
    values = values.repeat_interleave(HEADS // KV_HEADS, 1)
    scores = torch.einsum("nhd,mhd->hnm", query, keys) * SCALE
    later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(scores.shape[2] - len(query) + 1)
    weights = scores.masked_fill(later, -torch.inf).softmax(-1)
    return torch.einsum("hnm,mhd->nhd", weights, values)


def main() -> None:
    torch.manual_seed(0)
    cache = PagedKVCache(1, num_blocks=12, block_size=BLOCK, num_kv_heads=KV_HEADS, head_dim=DIM)
    builder = BatchBuilder(cache.num_blocks, BLOCK)
    # tokens of this step, cached tokens, blocks in order of position
    requests = [
        Request(tokens=[7], context_len=9, block_table=[3, 5, 1]),
        Request(tokens=[8], context_len=6, block_table=[3, 9]),  # block 3 is a common prefix
        Request(tokens=[1, 2, 3, 4, 5], context_len=5, block_table=[2, 8, 4], num_logits=1),
    ]
    cache.key(0).normal_()  # keys and values of earlier steps
    cache.value(0).normal_()

    step = builder.plan(requests)
    print("the step needs", step.need)
    bucket = {"tokens": 8, "shared": 4, "unique": 4, "logits": 4}  # any that holds the need
    batch = step.fill(bucket)
    query = torch.randn(8, HEADS, DIM)  # rows 7 and up are padding
    key, value = torch.randn(2, 8, KV_HEADS, DIM)
    out = unified_attention(
        query, key, value, cache.key(0), cache.value(0), SCALE, batch.metadata(BLOCK)
    )

    row = 0
    for index, request in enumerate(requests):
        new, length = len(request.tokens), request.context_len + len(request.tokens)
        slots = [request.block_table[p // BLOCK] * BLOCK + p % BLOCK for p in range(length)]
        expected = dense(query[row : row + new], cache.key(0)[slots], cache.value(0)[slots])
        error = (out[row : row + new] - expected).abs().max().item()
        print(f"request {index}: {new} new tokens after {request.context_len}, error {error:.1e}")
        row += new
    print("padded rows are zero:", not out[row:].any().item())


if __name__ == "__main__":
    main()
