"""FlexAttention compiled for a CPU: a decode step in which no row sees a key returns garbage.

With no block at all there are 0 partitions, and the output is read from a buffer that nothing has
written (`num_partitions` in FLEX_DECODING_TEMPLATE of
torch/_inductor/codegen/cpp_flex_attention_template.py).

Seen with torch 2.13.0 and 2.15.0.
"""

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

key, value = torch.randn(2, 2, 1, 1024, 64)
query = torch.randn(2, 1, 1, 64)
lengths = torch.tensor([0, 0])
mask = create_block_mask(lambda b, h, q, k: k < lengths[b], 2, None, 1, 1024, device="cpu")
decode = torch.compile(flex_attention, dynamic=False)
print(torch.__version__)
for attempt in range(100):
    junk = [torch.full((size,), 7.0) for size in range(64, 4096, 8)]
    del junk
    got = decode(query, key, value, block_mask=mask)
    assert not got.any(), f"expected zeros, got {got[0, 0, 0, :4]} in call {attempt}"
