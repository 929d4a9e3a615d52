"""Unified attention as a layer."""

from __future__ import annotations

from torch import Tensor, nn

from compiled_attn.attention.metadata import UnifiedMetadata
from compiled_attn.attention.state import Attend
from compiled_attn.attention.step_shadow import step_shadow
from compiled_attn.attention.unified import unified_attention
from compiled_attn.cache.kv_cache import PagedKVCache
from compiled_attn.cache.slot_shadow import check_layer
from compiled_attn.ops import CHOICES, KernelChoice

__all__ = ["UnifiedAttention"]


class UnifiedAttention(nn.Module):
    """`unified_attention` of one layer over a `PagedKVCache`.

    Args:
        cache: the paged cache of the model: of floats, quantised, or without V.
        layer: index of this layer in the cache.
        scale: factor of the scores; None: ``cache.head_dim ** -0.5``, which is wrong for a cache of
            latents.
        sliding_window, softcap, attend, kernel, fused_write: as in `unified_attention`. In a
            `torch.compiler.nested_compile_region` pass ``fused_write=False``.
        alibi_slopes: ``[H]`` tensor or None, registered as a buffer.
        sinks: ``[H]`` parameter or None.
        value_projection: ``[H, R, Dv]`` parameter or None.

    Raises:
        ValueError: unknown layer or kernel.

    Shape:
        - forward(query ``[T, H, D]``, key ``[T, Hk, D]``, value ``[T, Hk, D]``, metadata) -> ``[T,
          H, D]``; value is None for a cache without V
    """

    alibi_slopes: Tensor | None

    def __init__(
        self,
        cache: PagedKVCache,
        layer: int = 0,
        *,
        scale: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        alibi_slopes: Tensor | None = None,
        sinks: nn.Parameter | None = None,
        value_projection: nn.Parameter | None = None,
        attend: Attend | None = None,
        kernel: KernelChoice = "auto",
        fused_write: bool = True,
    ) -> None:
        super().__init__()
        if kernel not in CHOICES:
            raise ValueError(f"expected a kernel of {CHOICES}, got {kernel!r}: choose one of these")
        if not 0 <= layer < cache.num_layers:
            raise ValueError(f"expected a layer in 0..{cache.num_layers - 1}, got {layer}")
        self.cache = cache
        self.layer = layer
        self.scale = cache.head_dim**-0.5 if scale is None else scale
        self.sliding_window = sliding_window
        self.softcap = softcap
        self.register_buffer("alibi_slopes", alibi_slopes, persistent=False)
        self.sinks = sinks
        self.value_projection = value_projection
        self.attend = attend
        self.kernel = kernel
        self.fused_write = fused_write

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor | None, metadata: UnifiedMetadata
    ) -> Tensor:
        """Writes the step's keys and values, then attends: see `unified_attention`."""
        cache, layer = self.cache, self.layer
        if cache.shadow is not None:
            step = step_shadow(cache.shadow, metadata, window=self.sliding_window)
            if (own := cache.layer_shadow(layer, step)) is not None:
                check_layer(own, metadata.slot_mapping)
        out = unified_attention(
            query, key, value, cache.key(layer), cache.value(layer) if cache.has_value else None,
            self.scale, metadata, sliding_window=self.sliding_window, softcap=self.softcap,
            alibi_slopes=self.alibi_slopes, sinks=self.sinks, key_scale=cache.key_scale(layer),
            value_scale=cache.value_scale(layer), value_projection=self.value_projection,
            attend=self.attend, kernel=self.kernel, fused_write=self.fused_write,
        )  # fmt: skip
        assert isinstance(out, Tensor)
        return out
