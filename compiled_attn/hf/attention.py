"""Attention of a Hugging Face layer over the paged cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from compiled_attn.attention.metadata import UnifiedMetadata
from compiled_attn.attention.unified import unified_attention
from compiled_attn.cache.kv_cache import PagedKVCache
from compiled_attn.hf.latent import absorb
from compiled_attn.hf.names import ATTENTION_NAME

__all__ = ["ATTENTION_NAME", "PagedStep", "paged_attention_forward"]


@dataclass(frozen=True)
class PagedStep:
    """What every layer's attention needs of a step: handed to the model as the keyword ``paged``.

    The metadata of each window that the model's layers use is made once a step, for all layers; of
    a step request by request it is the same for all.
    """

    cache: PagedKVCache
    by_window: dict[int | None, UnifiedMetadata]

    @staticmethod
    def of(cache: PagedKVCache, metadata: UnifiedMetadata, windows: tuple[int, ...]) -> PagedStep:
        """The step, in parts with its metadata seen through each of the windows."""
        by_window: dict[int | None, UnifiedMetadata] = {None: metadata}
        if metadata.has_parts:
            by_window |= {window: metadata.windowed(window) for window in windows}
        return PagedStep(cache, by_window)

    def seen_through(self, window: int | None) -> tuple[UnifiedMetadata, int | None]:
        """The metadata for layers of a window, and the window if the metadata is without it."""
        if window in self.by_window:
            return self.by_window[window], None
        return self.by_window[None], window


def paged_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | PagedStep | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    paged: PagedStep | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer, as `transformers.AttentionInterface` calls it.

    Args:
        module: the layer's attention module; its ``layer_idx`` names the layer of the cache.
        query: ``[1, H, T, D]``, after rotary embedding.
        key, value: ``[1, Hk, T, D]`` and ``[1, Hk, T, Dv]``; where the cache keeps latents both are
            those, ``[1, 1, T, R + rope]``, see `compiled_attn.hf.latent`.
        attention_mask: must be None; who sees what is in ``paged``. Or the step itself, from
            layers that hand no keywords on.
        scaling, dropout, sliding_window, softcap, s_aux: as the model passes them.
        paged: the step.

    Returns:
        ``[1, T, H, Dv]`` and None (no attention weights).

    Raises:
        ValueError: no ``paged`` keyword, a mask, dropout, or a batch that is not flattened.
    """
    if isinstance(attention_mask, PagedStep):
        paged, attention_mask = attention_mask, None
    if paged is None:
        raise ValueError(
            f"attention {ATTENTION_NAME!r} expected the keyword paged=PagedStep(...), got none: "
            "call the model through compiled_attn.hf.PagedCausalLM, or set another attention"
        )
    if attention_mask is not None or dropout or query.shape[0] != 1:
        raise ValueError(
            f"attention {ATTENTION_NAME!r} expected a flattened [1, T] batch in eval mode without "
            f"a mask, got batch {query.shape[0]}, dropout {dropout}, "
            f"mask {attention_mask is not None}"
        )
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    projection = None
    if not (keeps_value := paged.cache.keeps_value(layer)):
        query, projection = absorb(module, query)
    metadata, window = paged.seen_through(sliding_window)
    out = unified_attention(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1) if keeps_value else None,
        paged.cache.key(layer),
        paged.cache.value(layer) if keeps_value else None,
        scaling,
        metadata,
        sliding_window=window,
        softcap=softcap,
        sinks=s_aux,
        key_scale=paged.cache.key_scale(layer),
        value_scale=paged.cache.value_scale(layer),
        value_projection=projection,
        attend=None,
        fused_write=False,  # a layer is a region
    )
    assert isinstance(out, Tensor)
    return out.unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, paged_attention_forward)
