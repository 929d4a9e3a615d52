"""transformers' continuous batching ignores the soft cap of attention (`paged|eager`).

Gemma 2 passes `softcap=` to the attention function; `eager_paged_attention_forward` takes it in
`**kwargs` and drops it. `eager` is the only CPU implementation that supports soft caps, and
continuous batching replaces it by `paged|eager`.

Seen with transformers 5.24.0.
"""

import torch
import transformers
from transformers import Gemma2Config, Gemma2ForCausalLM


def logits(softcap: float | None) -> list[torch.Tensor]:
    config = Gemma2Config(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, head_dim=16,
        num_attention_heads=2, num_key_value_heads=1, attn_logit_softcapping=softcap,
        query_pre_attn_scalar=1, initializer_range=1.0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Gemma2ForCausalLM(config).eval()
    ids = torch.randint(64, (1, 9))
    mask = torch.full((9, 9), torch.finfo(torch.float32).min).triu(1)[None, None]
    masks = dict.fromkeys(("full_attention", "sliding_attention"), mask)
    found = []
    for name in ("eager", "paged|eager"):
        model.set_attn_implementation(name)
        with torch.no_grad():
            found.append(model(ids, attention_mask=masks, use_cache=False).logits)
    return found


print(transformers.__version__)
for softcap in (None, 1.0):
    eager, paged = logits(softcap)
    print(f"softcap {softcap}: logits differ by {(eager - paged).abs().max():.1e}")
    torch.testing.assert_close(paged, eager)
