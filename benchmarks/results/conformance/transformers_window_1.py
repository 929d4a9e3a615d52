"""transformers' continuous batching ignores a sliding window of 1 token.

`build_attention_mask` uses 1 for "no window" (`if sliding_window > 1`).

Seen with transformers 5.24.0.
"""

import torch
import transformers
from transformers.generation.continuous_batching.utils import build_attention_mask

for window in (1, 2):
    mask = torch.full((1, 1, 4, 4), torch.finfo(torch.float32).min)
    build_attention_mask(mask, [0, 4], [0, 4], sliding_window=window)
    visible = (mask == 0)[0, 0]
    print(transformers.__version__, f"window {window}:", visible.sum(1).tolist(), "visible keys")
    assert visible.sum(1).max() == window
