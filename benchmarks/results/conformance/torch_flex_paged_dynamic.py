"""FlexAttention over pages, compiled for a CPU with dynamic shapes: the C++ does not compile.

`modification` in torch/_inductor/codegen/cpp_flex_attention_template.py replaces the name of a size
such as ks1 by plain text, within ks17 too: "cur_qSplitSize7 was not declared". With `dynamic=None`
it happens at the first call with another batch size, query length or cache size.

Seen with torch 2.13.0 and 2.15.0.
"""

import torch
from torch.nn.attention.experimental._paged_attention import PagedAttention
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

pages = PagedAttention(n_pages=5, page_size=32, max_batch_size=2, device="cpu")
lengths = torch.tensor([90, 30])
for row, length in enumerate(lengths):
    pages.reserve(torch.tensor([row]), length)
key, value = torch.randn(2, 1, 2, 5 * 32, 64)
query = torch.randn(2, 2, 5, 64)
mask = create_block_mask(lambda b, h, q, k: k <= q, 2, None, 5, 96, "cpu", BLOCK_SIZE=(128, 32))
paged = pages.convert_logical_block_mask(mask, kv_len=lengths)
score = pages.get_score_mod(None, kv_len=lengths)

print(torch.__version__)
expected = flex_attention(query, key, value, score, paged)
got = torch.compile(flex_attention, dynamic=True)(query, key, value, score, paged)
torch.testing.assert_close(got, expected)
