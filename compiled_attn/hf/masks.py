"""A test of a layer's mask: it must see what causal attention, with or without a window, sees."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import DynamicCache, PreTrainedModel

from compiled_attn.hf.recorder import AttentionCall

__all__ = ["forgetting", "other_sight"]

_LAST = 2**17
_TWO_THIRDS = _LAST * 2 // 3


def other_sight(call: AttentionCall) -> str | None:
    """What a call sees that its ``sliding_window`` does not say; None: nothing.

    Short prompts do not show the difference, so the function behind the mask is asked about far
    positions.
    """
    if not call.has_mask:
        return None
    if call.sees is None:
        return "that makes a mask of its own"
    keys = torch.arange(_LAST + 2, device=call.query.device)
    queries = torch.tensor([0, 1, _TWO_THIRDS, _LAST], device=keys.device).unsqueeze(1)
    zero = torch.zeros((), dtype=torch.int64, device=keys.device)
    try:
        seen = call.sees(zero, zero, queries, keys)
    except Exception:  # it looks up a tensor of the three tokens
        return "whose mask depends on the tokens"
    distance = queries - keys
    expected = (distance >= 0) & (distance < (call.window or _LAST + 1))
    if not torch.equal(torch.broadcast_to(seen, expected.shape), expected):
        wanted = f"a window of {call.window}" if call.window else "all before it"
        return f"that sees other tokens than {wanted}"
    return None


def forgetting(model: PreTrainedModel, calls: Sequence[AttentionCall]) -> str | None:
    """Which layer sees more than transformers' own cache keeps of it; None: none does.

    There `generate`, which uses that cache, gives other tokens than the model without it.
    """
    try:
        kept = DynamicCache(config=model.config).layers
    except Exception:  # not every configuration knows its cache; then nothing is forgotten
        return None
    for number, (call, layer) in enumerate(zip(calls, kept, strict=False)):
        window = getattr(layer, "sliding_window", None)
        if window is not None and (call.window or _LAST) > window:
            sees = f"a window of {call.window}" if call.window else "all before it"
            return f"whose layer {number} sees {sees}, while its own cache keeps {window} tokens"
    return None
