"""transformers' continuous batching: NaN or inf of one request reaches all requests of a batch.

Keys of all requests are concatenated behind one additive mask of `finfo.min`, and NaN + min is NaN
(inf in values: 0 * inf). One request that overflows, which float16 does at 65504, ends all others.

Seen with transformers 5.24.0.
"""

import sys
from types import SimpleNamespace

import torch
import transformers
from transformers.generation.continuous_batching.utils import build_attention_mask
from transformers.integrations.eager_paged import eager_paged_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward

query, key, value = torch.randn(3, 1, 1, 8, 16)  # two requests of 4 tokens
key[:, :, 4:] = float("nan")  # of the second
mask = torch.full((1, 1, 8, 8), torch.finfo(torch.float32).min)
build_attention_mask(mask, [0, 4, 8], [0, 4, 8])
layer = SimpleNamespace(num_key_value_groups=1, is_causal=False)
print(transformers.__version__)
wrong = 0
for forward in (eager_paged_attention_forward, sdpa_attention_forward):
    out, _ = forward(layer, query, key, value, mask, scaling=0.25, is_causal=False)
    wrong += int(out[0, :4].isnan().sum())
    print(f"{forward.__name__}: {int(out[0, :4].isnan().sum())} NaN of 64 in the first request")
sys.exit(bool(wrong))
