"""FlexAttention compiled for a CPU: a decode step whose scores are all low returns zeros.

A partition of keys that a row does not see counts with a maximum of 0, not -inf, so that the sums
of the other partitions underflow (`partition_max = 0` in FLEX_DECODING_TEMPLATE of
torch/_inductor/codegen/cpp_flex_attention_template.py).

Seen with torch 2.13.0 and 2.15.0.
"""

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

torch.manual_seed(0)
key, value = torch.randn(2, 2, 1, 1024, 64)
key[:] = key[:, :, :1] + key / 100
query = -20 * key[:, :, :1]  # all scores are near -160
lengths = torch.tensor([100, 1000])
mask = create_block_mask(lambda b, h, q, k: k < lengths[b], 2, None, 1, 1024, device="cpu")

expected = flex_attention(query, key, value, block_mask=mask)
got = torch.compile(flex_attention, dynamic=False)(query, key, value, block_mask=mask)
print(torch.__version__)
print("eager   ", expected[0, 0, 0, :4])
print("compiled", got[0, 0, 0, :4])
assert torch.allclose(got, expected, atol=1e-4)
