"""New tokens by dense flash attention, their context by Triton's paged kernel, merged.

Prompts without context are then as fast as dense attention. It differs from Triton's kernel alone
in two ways: a non-finite value of a new token may reach other rows; and new tokens are read where
they were computed, not from the caches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_attn.ops.call import PagedCall
from compiled_attn.ops.providers import flash, varlen
from compiled_attn.ops.providers.base import Paged

__all__ = ["DensePaged"]


class DensePaged:
    """``varlen_attn`` of torch without pages, next to Triton's kernel."""

    name = "dense+paged"

    def version(self) -> str:
        """See `compiled_attn.ops.providers.Provider`."""
        return str(varlen.active_implementation())

    def why_not(self, call: PagedCall) -> str | None:
        """See `compiled_attn.ops.providers.Provider`."""
        if call.new is None:
            return "needs the step's new keys and values next to the caches"
        if call.scoring.window is not None:
            return "has no window, as the rows of a request begin it at different keys"
        if lacks := flash.lacks(call) or varlen.lacks_arguments(*varlen.OPTIONS):
            return lacks
        major, minor = flash.capability(call.query.device)
        return f"needs sm_80, not sm_{major}{minor}" if major < 8 else None

    def attend(self, call: PagedCall, paged: Paged) -> tuple[Tensor, Tensor]:
        """See `compiled_attn.ops.providers.Provider`."""
        from compiled_attn.ops.triton.combine import combine  # imports Triton

        assert call.new is not None
        starts, tokens = call.query_start_loc, call.query.shape[0]
        new = varlen.varlen_attn(
            call.query, call.new.key, call.new.value, starts, starts, tokens, tokens,
            **varlen.options(call),
        )  # fmt: skip
        # All rows of a request see all of its context: negative lengths become NaN.
        lengths = call.seq_lens - torch.diff(starts)
        context = paged(call._replace(seq_lens=lengths, causal=False, new=None))
        return combine(new, context, starts)
