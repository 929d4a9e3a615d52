"""The attention backend that vLLM imports after `register`; the cache has vLLM's layout.

Encoders, which have no KV cache, use vLLM's own kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from compiled_attn.errors import EngineUnsupported

__all__ = ["PagedAttentionBackend", "PagedAttentionBuilder", "PagedAttentionImpl", "cache_views"]

_ENCODERS = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)
_FP8 = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


class PagedAttentionBuilder(CPUAttentionMetadataBuilder):  # type: ignore[misc]
    """Builds the metadata of a step without vLLM's own scheduler metadata."""

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CPUAttentionMetadata:
        """Return the metadata of a step.

        Raises:
            EngineUnsupported: only some of its requests are causal.
        """
        step = common_attn_metadata
        if self.is_encoder_only_attention:
            return super().build(common_prefix_len, step, fast_build)
        if isinstance(step.causal, Tensor):
            raise EngineUnsupported(
                "expected a model whose requests are all causal, got a mask of requests: "
                "unset COMPILED_ATTN_VLLM for it"
            )
        tokens = step.num_actual_tokens
        return CPUAttentionMetadata(
            num_actual_tokens=tokens,
            max_query_len=step.max_query_len,
            query_start_loc=step.query_start_loc,
            max_seq_len=step.max_seq_len,
            seq_lens=step.seq_lens,
            block_table=step.block_table_tensor,
            # Padding has slot -1; block 0 is the null block here and in vLLM.
            slot_mapping=step.slot_mapping[:tokens].clamp_min(0),
            scheduler_metadata=None,
            causal=bool(step.causal),
        )


class PagedAttentionImpl(CPUAttentionBackendImpl):  # type: ignore[misc]
    """Attention of one layer: one op writes the new tokens and attends."""

    sinks: Tensor | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.attn_type == AttentionType.ENCODER_DECODER:
            raise EngineUnsupported(
                "expected a model that decodes, got cross-attention: unset COMPILED_ATTN_VLLM"
            )
        self._window = self.sliding_window if self.sliding_window > 0 else None
        self._softcap = self.logits_soft_cap or None
        self._scales: dict[str, Tensor] = {}

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """See `CPUAttentionBackendImpl.forward`; also writes ``kv_cache``."""
        if attn_metadata is None:  # vLLM profiles its memory
            return output
        if self.attn_type in _ENCODERS:
            out: Tensor = super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale,
                output_block_scale,
            )  # fmt: skip
            return out
        self._attend(layer, query, key, value, kv_cache, attn_metadata, output)
        return output

    def _attend(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        step: CPUAttentionMetadata,
        output: Tensor,
    ) -> None:
        tokens = step.num_actual_tokens
        caches = cache_views(kv_cache, _FP8.get(self.kv_cache_dtype))
        where = step.block_table, step.seq_lens, step.query_start_loc
        options = self._options(step.causal)
        new = None  # a layer that shares a cache does not write it
        if key is not None and value is not None and not self.kv_sharing_target_layer_name:
            new = key[:tokens], value[:tokens]
        if new is not None and not self.is_fp8_kv_cache:
            out, _ = torch.ops.compiled_attn.paged_attention_(
                query[:tokens], *new, *caches, step.slot_mapping, *where, self.scale, **options
            )
        else:
            if self.is_fp8_kv_cache:
                options |= self._layer_scales(layer, caches[0])
            if new is not None:  # the op's own write would choose a scale per token
                _write_fp8(caches[0], new[0] / layer._k_scale_float, step.slot_mapping)
                _write_fp8(caches[1], new[1] / layer._v_scale_float, step.slot_mapping)
            out, _ = torch.ops.compiled_attn.paged_attention(
                query[:tokens], *caches, *where, self.scale, **options
            )
        output[:tokens].view(out.shape).copy_(out)

    def _options(self, causal: bool) -> dict[str, Any]:
        if self._window is not None and not causal:
            raise EngineUnsupported(
                "expected layers with a window to be causal, got one that is not: unset "
                "COMPILED_ATTN_VLLM for this model"
            )
        sinks: Tensor | None = self.sinks
        if sinks is not None and sinks.dtype != torch.float32:
            self.sinks = sinks = sinks.float()  # loaded after the layer was created
        return {
            "causal": causal,
            "window": self._window,
            "softcap": self._softcap,
            "alibi_slopes": self.alibi_slopes,
            "sinks": sinks,
        }

    def _layer_scales(self, layer: Any, cache: Tensor) -> dict[str, Tensor]:
        """The scale of the layer, expanded to one per token and head without copies."""
        if not self._scales:
            sizes = cache.shape[:3]
            self._scales = {
                "key_scale": torch.tensor(float(layer._k_scale_float)).expand(sizes),
                "value_scale": torch.tensor(float(layer._v_scale_float)).expand(sizes),
            }
        return self._scales


class PagedAttentionBackend(CPUAttentionBackend):  # type: ignore[misc]
    """Replaces vLLM's ``CPU_ATTN`` under the same name; our op serves all layers with a cache."""

    forward_includes_kv_cache_update = True

    @staticmethod
    def get_impl_cls() -> type[PagedAttentionImpl]:
        """Return the class of a layer's attention."""
        return PagedAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[PagedAttentionBuilder]:
        """Return the class that builds a step's metadata."""
        return PagedAttentionBuilder


def cache_views(kv_cache: Tensor, fp8: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Return views of keys and values, ``[B, N, H, D]`` each.

    Args:
        kv_cache: vLLM's, ``[B, H, N, 2 * D]``; per block and head, keys come before values.
        fp8: dtype of a cache stored as bytes; None: the cache's own dtype.
    """
    blocks, heads, size, both = kv_cache.shape
    rows = kv_cache.view(blocks, heads, 2 * size, both // 2)
    if fp8 is not None:
        rows = rows.view(fp8)
    key, value = rows.chunk(2, dim=2)
    return key.transpose(1, 2), value.transpose(1, 2)


def _write_fp8(cache: Tensor, new: Tensor, slots: Tensor) -> None:
    """Write new tokens ``[T, H, D]``, rounded to nearest."""
    largest = torch.finfo(cache.dtype).max
    rounded = new.float().clamp(-largest, largest).to(cache.dtype)
    size = cache.shape[1]
    # Indexed writes of fp8 are not supported everywhere, those of bytes are.
    cache.view(torch.uint8)[slots // size, slots % size] = rounded.view(torch.uint8)
