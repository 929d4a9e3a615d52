"""FlashInfer's kernels of TensorRT-LLM for sm_100, where it is installed.

Its other kernels plan each step on the host, which a recorded graph cannot replay. Like flash
attention it does not isolate non-finite values and does not check indices.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from compiled_attn.ops.call import PagedCall
from compiled_attn.ops.providers import flash
from compiled_attn.ops.providers.base import Paged
from compiled_attn.ops.providers.library import Library

__all__ = ["FlashInfer"]

_WORKSPACE_BYTES = 128 << 20


class FlashInfer:
    """The kernel behind ``flashinfer.prefill.trtllm_batch_context_with_kv_cache``."""

    name = "flashinfer"

    def __init__(self) -> None:
        self.library = Library(
            "flashinfer-python", "flashinfer.prefill", "trtllm_batch_context_with_kv_cache",
            ("query", "kv_cache", "workspace_buffer", "block_tables", "seq_lens", "max_q_len",
             "max_kv_len", "bmm1_scale", "bmm2_scale", "batch_size", "cum_seq_lens_q",
             "cum_seq_lens_kv", "window_left", "kv_layout", "causal", "return_lse"),
        )  # fmt: skip

    def version(self) -> str:
        """See `compiled_attn.ops.providers.Provider`."""
        return self.library.version()

    def why_not(self, call: PagedCall) -> str | None:
        """See `compiled_attn.ops.providers.Provider`."""
        if lacks := flash.lacks(call):
            return lacks
        major, minor = flash.capability(call.query.device)
        if major != 10:
            return f"plans each step on the host but for sm_100, not on sm_{major}{minor}"
        return self.library.why_not()

    def attend(self, call: PagedCall, paged: Paged) -> tuple[Tensor, Tensor]:
        """See `compiled_attn.ops.providers.Provider`."""
        requests, width = call.block_table.shape
        ends = torch.nn.functional.pad(call.seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
        out, lse = self.library.call(
            query=call.query, kv_cache=(call.key_cache, call.value_cache),
            workspace_buffer=_workspace(call.query.device), block_tables=call.block_table,
            seq_lens=call.seq_lens, max_q_len=call.query.shape[0],
            max_kv_len=width * call.key_cache.shape[1], bmm1_scale=float(call.scoring.scale),
            bmm2_scale=1.0, batch_size=requests, cum_seq_lens_q=call.query_start_loc,
            cum_seq_lens_kv=ends, window_left=flash.window_of(call)[0], kv_layout="NHD",
            causal=call.causal, return_lse=True,
        )  # fmt: skip
        return flash.own_rows(call, out, lse.t() * math.log(2.0))  # its lse has base 2


@functools.cache
def _workspace(device: torch.device) -> Tensor:
    # All graphs of a device share it, which is safe on one stream: its kernels for prompts split no
    # keys, so no counters stay there from launch to launch. A launch writes the statistics of its
    # lse there and reads them again before the next one begins. On two streams at once, an lse may
    # be of the other's statistics; out is not computed from them.
    return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
