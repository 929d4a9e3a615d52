"""FlashAttention 3 over pages, ``flash_attn_interface``, where it is installed.

Like the kernel of torch (`compiled_attn.ops.providers.varlen`) it does not isolate non-finite
values and does not check indices.
"""

from __future__ import annotations

from torch import Tensor

from compiled_attn.ops.call import PagedCall
from compiled_attn.ops.providers import flash
from compiled_attn.ops.providers.base import Paged
from compiled_attn.ops.providers.library import Library

__all__ = ["FlashAttention3"]


class FlashAttention3:
    """The kernel behind ``flash_attn_interface.flash_attn_with_kvcache``."""

    name = "fa3"

    def __init__(self) -> None:
        self.library = Library(
            "flash_attn_3", "flash_attn_interface", "flash_attn_with_kvcache",
            ("q", "k_cache", "v_cache", "page_table", "cache_seqlens", "cu_seqlens_q",
             "max_seqlen_q", "softmax_scale", "causal", "window_size", "softcap",
             "return_softmax_lse"),
        )  # fmt: skip

    def version(self) -> str:
        """See `compiled_attn.ops.providers.Provider`."""
        return self.library.version()

    def why_not(self, call: PagedCall) -> str | None:
        """See `compiled_attn.ops.providers.Provider`."""
        if lacks := flash.lacks(call, softcap=True):
            return lacks
        major, minor = flash.capability(call.query.device)
        return self.library.why_not() if major == 9 else f"needs sm_90, not sm_{major}{minor}"

    def attend(self, call: PagedCall, paged: Paged) -> tuple[Tensor, Tensor]:
        """See `compiled_attn.ops.providers.Provider`."""
        out, lse, *_ = self.library.call(
            call.query, call.key_cache, call.value_cache, page_table=call.block_table,
            cache_seqlens=call.seq_lens, cu_seqlens_q=call.query_start_loc,
            max_seqlen_q=call.query.shape[0], softmax_scale=float(call.scoring.scale),
            causal=call.causal, window_size=flash.window_of(call),
            softcap=float(call.scoring.softcap or 0.0), return_softmax_lse=True,
        )  # fmt: skip
        return flash.own_rows(call, out, lse)
