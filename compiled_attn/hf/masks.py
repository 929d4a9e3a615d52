"""Whether a layer sees what causal attention, with or without a window, sees."""

from __future__ import annotations

import torch

from compiled_attn.hf.recorder import AttentionCall

__all__ = ["other_sight"]

_LAST = 2**17


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


_TWO_THIRDS = _LAST * 2 // 3
