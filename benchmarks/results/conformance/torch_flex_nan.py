"""FlexAttention, eager and compiled: NaN in a slot that the mask hides makes the output NaN.

0 * NaN is NaN. Over pages these are the free slots of a request's last page; in eager mode, also
those of all other pages.

Seen with torch 2.13.0 and 2.15.0.
"""

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

key, value = torch.randn(2, 1, 1, 128, 64)
query = torch.randn(1, 1, 16, 64)
value[:, :, 100:] = float("nan")  # keys remain finite
mask = create_block_mask(lambda b, h, q, k: k < 100, 1, None, 16, 128, device="cpu")

print(torch.__version__)
got = {
    "eager": flex_attention(query, key, value, block_mask=mask),
    "compiled": torch.compile(flex_attention)(query, key, value, block_mask=mask),
}
for mode, out in got.items():
    print(f"{mode:9}{int(out.isnan().sum())} of {out.numel()} elements are NaN")
assert not any(out.isnan().any() for out in got.values())
