"""Attention of a Hugging Face model over the paged cache, and the step that it reads.

For multi-head latent attention the cache stores latents: the modules of transformers' DeepSeek
family expand the latents ``c [R]`` and the rotated key ``r`` of a token to keys ``[W_k c, r]`` and
values ``W_v c`` of every head, in a method ``expand_kv``. It is replaced by one that does not
expand; scores are then ``(W_k^T q_nope) c + q_rope r``, and ``W_v`` is applied to the sum over
tokens. Source: DeepSeek-V2 (2024), 2.1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from compiled_attn.attention.metadata import UnifiedMetadata, through
from compiled_attn.attention.unified import unified_attention
from compiled_attn.cache.kv_cache import KVShape, PagedKVCache, write_slots
from compiled_attn.cache.slot_shadow import LayerShadow, StepShadow, check_layer
from compiled_attn.models.hf.states.carrier import LayerStates

__all__ = [
    "ATTENTION_NAME",
    "LogitsRows",
    "PagedLayer",
    "PagedStep",
    "absorb",
    "expansion_weight",
    "latent_shape",
    "paged_attention_forward",
    "store_latents",
]

ATTENTION_NAME = "compiled_attn"
"""Name under which `paged_attention_forward` is registered with transformers."""


def latent_shape(module: Any) -> KVShape | None:
    """Cache shape of latent attention, ``R`` latents and the rotated key; None for others."""
    up = getattr(module, "kv_b_proj", None)
    if not hasattr(type(module), "expand_kv") or type(up) is not nn.Linear:
        return None
    if getattr(up, "bias", None) is not None:
        return None
    rank, rotated = up.in_features, int(module.qk_rope_head_dim)
    return KVShape(1, rank + rotated, None)


def store_latents(module: Any) -> None:
    """Makes a module pass its latents to our attention; for any other it still expands them."""
    module.expand_kv = MethodType(_latents, module)


def _latents(module: Any, latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    """Replaces ``expand_kv``: ``[1, 1, T, R]`` and ``[1, 1, T, rope]`` -> the key, twice."""
    if module.config._attn_implementation != ATTENTION_NAME:
        expanded: tuple[Tensor, Tensor] = type(module).expand_kv(module, latent, rotated)
        return expanded
    key = torch.cat((latent, rotated), dim=-1)
    return key, key


def expansion_weight(module: Any) -> Tensor:
    """The weight that `absorb` splits, which therefore must not be packed."""
    weight: Tensor = module.kv_b_proj.weight
    return weight


def absorb(module: Any, query: Tensor) -> tuple[Tensor, Tensor]:
    """Moves queries into the space of the latents; returns also the projection back to values.

    ``[1, H, T, nope + rope]`` -> ``[1, H, T, R + rope]``, ``[H, R, Dv]``.
    """
    nope, rope = query.split((module.qk_nope_head_dim, module.qk_rope_head_dim), dim=-1)
    weight = expansion_weight(module).unflatten(0, (query.shape[1], -1))
    key, value = weight.split((module.qk_nope_head_dim, module.v_head_dim), dim=1)
    return torch.cat((torch.matmul(nope, key), rope), dim=-1), value.transpose(1, 2)


class PagedLayer(NamedTuple):
    """A step as one layer sees it, which does not depend on the number of the layer.

    Args:
        by_window, only_writes: see `PagedStep`.
        key, value: the layer's slots in the cache, see `PagedKVCache.key`; no values if they are
            part of the keys.
        key_scale, value_scale: scales of a quantised cache, or None.
        shadow: what the sanitizer checks, or None.
    """

    by_window: dict[int | None, UnifiedMetadata]
    only_writes: bool
    key: Tensor
    value: Tensor | None
    key_scale: Tensor | None
    value_scale: Tensor | None
    shadow: LayerShadow | None


class LogitsRows(NamedTuple):
    """The rows of a step that need logits: all that its last layer computes after the K/V writes.

    Args:
        rows: ``[L]`` rows of T.
        step: the step of these rows alone.
    """

    rows: Tensor
    step: PagedStep


@dataclass(frozen=True)
class PagedStep:
    """What the attention of every layer needs, passed to the model as the keyword ``paged``.

    The metadata of each window is built once per step, for all layers; in table layout it is the
    same for all windows, unless layers have blocks of their own (`NearLayers`).

    Args:
        cache: the paged cache.
        by_window: the metadata for each window.
        logits: the rows that need logits, for the last layer; None: all rows.
        only_writes: attention writes keys and values and returns zeros.
        regions: for each decoder layer the key of its region, see
            `graphs.torch_internals.regions.Region`; None: layers are not regions.
        packed: ``by_window`` for these regions.
        shadow, near_shadow: what the sanitizer compares in layers without and with blocks of their
            own, or None.
        numbers: ``layer_idx`` of the module of each layer of the cache, if they are not the same,
            as only some layers of the model attend.
    """

    cache: PagedKVCache
    by_window: dict[int | None, UnifiedMetadata]
    logits: LogitsRows | None = None
    only_writes: bool = False
    regions: tuple[int | None, ...] | None = None
    packed: Any = None
    shadow: StepShadow | None = None
    near_shadow: StepShadow | None = None
    numbers: tuple[int, ...] | None = None

    @staticmethod
    def of(
        cache: PagedKVCache,
        metadata: UnifiedMetadata,
        windows: tuple[int, ...],
        numbers: tuple[int, ...] | None = None,
    ) -> PagedStep:
        """Builds the step; in parts layout with metadata for each of the windows."""
        by_window: dict[int | None, UnifiedMetadata] = {None: metadata}
        if cache.near is not None:
            near = metadata.through(cache.get_buffer("near_of"))
            by_window |= dict.fromkeys(windows, near)
        elif metadata.has_parts:
            by_window |= {window: metadata.windowed(window) for window in windows}
        return PagedStep(cache, by_window, numbers=numbers)

    def with_shadow(
        self, shadow_of: Callable[[UnifiedMetadata, int | None], StepShadow]
    ) -> PagedStep:
        """Adds what ``shadow_of(metadata, window)`` returns, ``window``: of all layers that have
        the same blocks."""
        cache = self.cache
        shadow = shadow_of(self.by_window[None], cache.window)
        if cache.near is None:
            return replace(self, shadow=shadow)
        near = shadow_of(self.by_window[cache.near.window], cache.near.window)
        slots = through(near.slots, cache.get_buffer("near_of"), cache.block_size)
        return replace(self, shadow=shadow, near_shadow=near._replace(slots=slots))

    def of_layer(self, layer: int) -> PagedLayer:
        """Returns the step as a layer of the cache sees it."""
        cache = self.cache
        value = cache.value(layer) if cache.stores_value(layer) else None
        scales = cache.key_scale(layer), cache.value_scale(layer)
        windows = self.by_window if self.packed is None else self.packed
        step = self.near_shadow if cache.is_near(layer) else self.shadow
        shadow = cache.layer_shadow(layer, step)
        return PagedLayer(windows, self.only_writes, cache.key(layer), value, *scales, shadow)

    def of_module(self, module: Any) -> PagedLayer:
        """Returns the step as the layer of an attention module sees it."""
        number = int(module.layer_idx)
        return self.of_layer(number if self.numbers is None else self.numbers.index(number))

    def states_of(self, place: int) -> LayerStates | None:
        """Returns the states of a decoder layer in this step; None if it has none."""
        states, metadata = self.cache.states, self.by_window[None]
        if states is None or not states.shapes[place]:
            return None
        needs = metadata.needs
        return LayerStates(
            states.of_layer(place),
            needs(metadata.state_slots, "state_slots"),
            needs(metadata.seq_lens, "seq_lens"),
            needs(metadata.query_start_loc, "query_start_loc"),
        )


def paged_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | PagedStep | PagedLayer | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    paged: PagedStep | PagedLayer | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer, as `transformers.AttentionInterface` calls it.

    Args:
        module: the layer's attention module; its ``layer_idx`` is the layer of the cache if
            ``paged`` is a `PagedStep`.
        query: ``[1, H, T, D]``, after rotary embedding.
        key, value: ``[1, Hk, T, D]`` and ``[1, Hk, T, Dv]``; if the cache stores latents, both
            are ``[1, 1, T, R + rope]``.
        attention_mask: must be None: ``paged`` determines visibility. Or the step itself, from
            layers that do not forward keywords.
        paged: the step.

    Returns:
        ``[1, T, H, Dv]`` and None (no attention weights); zeros if the step only writes.

    Raises:
        ValueError: no ``paged`` keyword, a mask, dropout, or a batch that is not flattened.
    """
    if isinstance(attention_mask, PagedStep | PagedLayer):
        paged, attention_mask = attention_mask, None
    if paged is None:
        raise ValueError(
            f"attention {ATTENTION_NAME!r} expected the keyword paged=PagedStep(...), got none: "
            "call the model through compiled_attn.models.hf.PagedCausalLM, or set another attention"
        )
    if attention_mask is not None or dropout or query.shape[0] != 1:
        raise ValueError(
            f"attention {ATTENTION_NAME!r} expected a flattened [1, T] batch in eval mode without "
            f"a mask, got batch {query.shape[0]}, dropout {dropout}, "
            f"mask {attention_mask is not None}"
        )
    if isinstance(paged, PagedStep):
        paged = paged.of_module(module)
    key_slots, value_slots, key_scale, value_scale, shadow = paged[2:]
    projection = None
    if value_slots is None:
        query, projection = absorb(module, query)
    metadata = paged.by_window.get(sliding_window, paged.by_window[None])
    if metadata.has_parts and sliding_window in paged.by_window:
        sliding_window = None  # which the metadata includes
    queries, keys, values = [each[0].transpose(0, 1) for each in (query, key, value)]
    if shadow is not None:
        check_layer(shadow, metadata.slot_mapping, reads=not paged.only_writes, keeps_first=False)
    if paged.only_writes:
        write_slots(key_slots, keys, metadata.slot_mapping, key_scale)
        if value_slots is not None:
            write_slots(value_slots, values, metadata.slot_mapping, value_scale)
        dim = (value if projection is None else projection).shape[-1]
        return query.new_zeros(1, *queries.shape[:2], dim), None
    out = unified_attention(
        queries,
        keys,
        None if value_slots is None else values,
        key_slots,
        value_slots,
        scaling,
        metadata,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
        key_scale=key_scale,
        value_scale=value_scale,
        value_projection=projection,
        attend=None,
        fused_write=False,  # a layer is a region
    )
    assert isinstance(out, Tensor)
    return out.unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, paged_attention_forward)
