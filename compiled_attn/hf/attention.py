"""The attention of a Hugging Face model over the paged cache, and how a step reaches it.

For multi-head latent attention the cache keeps what a token's keys and values are made of: the
modules of transformers' DeepSeek family expand the latents ``c [R]`` and the rotated key ``r`` of a
token to keys ``[W_k c, r]`` and values ``W_v c`` of every head, in a method of their own,
``expand_kv``. It is replaced by one that does not expand; the scores then take ``(W_k^T q_nope) c +
q_rope r``, and ``W_v`` is applied to the sum over tokens. Source: DeepSeek-V2 (2024), 2.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from compiled_attn.attention.call import check, write_tokens
from compiled_attn.attention.metadata import UnifiedMetadata
from compiled_attn.attention.scoring import Scoring
from compiled_attn.attention.unified import unified_attention
from compiled_attn.cache.kv_cache import KVShape, PagedKVCache

__all__ = [
    "ATTENTION_NAME",
    "PagedLayer",
    "PagedStep",
    "WantedRows",
    "Written",
    "absorb",
    "keep_latents",
    "latent_shape",
    "paged_attention_forward",
    "reads",
]

ATTENTION_NAME = "compiled_attn"
"""Attention over the paged cache."""


def latent_shape(module: Any) -> KVShape | None:
    """What the cache keeps of a token, ``R`` latents and the rotated key; None: no such module."""
    up = getattr(module, "kv_b_proj", None)
    if not hasattr(type(module), "expand_kv") or type(up) is not nn.Linear:
        return None
    if getattr(up, "bias", None) is not None:
        return None
    rank, rotated = up.in_features, int(module.qk_rope_head_dim)
    return KVShape(1, rank + rotated, None)


def keep_latents(module: Any) -> None:
    """Lets a module hand its latents to our attention; for any other it still expands them."""
    module.expand_kv = MethodType(_latents, module)


def _latents(module: Any, latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    """In place of ``expand_kv``: ``[1, 1, T, R]`` and ``[1, 1, T, rope]`` -> the key, twice."""
    if module.config._attn_implementation != ATTENTION_NAME:
        expanded: tuple[Tensor, Tensor] = type(module).expand_kv(module, latent, rotated)
        return expanded
    key = torch.cat((latent, rotated), dim=-1)
    return key, key


def reads(module: Any) -> Tensor:
    """The weight that `absorb` takes apart, and which must lie as it was made."""
    weight: Tensor = module.kv_b_proj.weight
    return weight


def absorb(module: Any, query: Tensor) -> tuple[Tensor, Tensor]:
    """The query in the space of the latents, and what takes the result back.

    Args:
        module: of latent attention, with H heads.
        query: ``[1, H, T, nope + rope]``.

    Returns:
        ``[1, H, T, R + rope]``; the value projection ``[H, R, Dv]``.
    """
    nope, rope = query.split((module.qk_nope_head_dim, module.qk_rope_head_dim), dim=-1)
    weight = reads(module).unflatten(0, (query.shape[1], -1))
    key, value = weight.split((module.qk_nope_head_dim, module.v_head_dim), dim=1)
    return torch.cat((torch.matmul(nope, key), rope), dim=-1), value.transpose(1, 2)


class Written(Exception):
    """The keys and values of a step that only writes are in the cache."""


class PagedLayer(NamedTuple):
    """A step as one layer sees it, so that what a layer is given tells nothing of its number.

    Args:
        by_window, only_writes: those of the step.
        key, value: the layer's slots in the cache, see `PagedKVCache.key`; no values where they are
            part of the keys.
        key_scale, value_scale: what their elements are multiplied by; None: nothing.
    """

    by_window: dict[int | None, UnifiedMetadata]
    only_writes: bool
    key: Tensor
    value: Tensor | None
    key_scale: Tensor | None
    value_scale: Tensor | None

    def seen_through(self, window: int | None) -> tuple[UnifiedMetadata, int | None]:
        """The metadata for layers of a window, and the window if the metadata is without it."""
        if window in self.by_window:
            return self.by_window[window], None
        return self.by_window[None], window


class WantedRows(NamedTuple):
    """Rows of a step that go on behind the keys and values of its last layer.

    Args:
        rows: ``[L]`` rows of T whose logits are wanted.
        step: of these rows alone.
    """

    rows: Tensor
    step: PagedStep


@dataclass(frozen=True)
class PagedStep:
    """What every layer's attention needs of a step: handed to the model as the keyword ``paged``.

    The metadata of each window that the model's layers use is made once a step, for all layers; of
    a step request by request it is the same for all.

    Args:
        cache: the paged cache.
        by_window: the metadata as seen through each window.
        wanted: all that its last layer computes; None: everything.
        only_writes: attention raises `Written` once the keys and values are.
        regions: for each decoder layer the key of its region, see
            `graphs.torch_internals.regions.Region`; None: layers are no regions.
        packed: ``by_window`` for these regions.
    """

    cache: PagedKVCache
    by_window: dict[int | None, UnifiedMetadata]
    wanted: WantedRows | None = None
    only_writes: bool = False
    regions: tuple[int | None, ...] | None = None
    packed: Any = None

    @staticmethod
    def of(cache: PagedKVCache, metadata: UnifiedMetadata, windows: tuple[int, ...]) -> PagedStep:
        """The step, in parts with its metadata seen through each of the windows."""
        by_window: dict[int | None, UnifiedMetadata] = {None: metadata}
        if metadata.has_parts:
            by_window |= {window: metadata.windowed(window) for window in windows}
        return PagedStep(cache, by_window)

    @property
    def tokens(self) -> int:
        """T."""
        return len(self.by_window[None].slot_mapping)

    def of_layer(self, layer: int) -> PagedLayer:
        """The step as a layer of the cache sees it."""
        cache = self.cache
        value = cache.value(layer) if cache.keeps_value(layer) else None
        scales = cache.key_scale(layer), cache.value_scale(layer)
        windows = self.by_window if self.packed is None else self.packed
        return PagedLayer(windows, self.only_writes, cache.key(layer), value, *scales)


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
        module: the layer's attention module; its ``layer_idx`` names the layer of the cache, where
            the step is that of all layers.
        query: ``[1, H, T, D]``, after rotary embedding.
        key, value: ``[1, Hk, T, D]`` and ``[1, Hk, T, Dv]``; where the cache keeps latents both are
            those, ``[1, 1, T, R + rope]``, see `compiled_attn.hf.attention`.
        attention_mask: must be None; who sees what is in ``paged``. Or the step itself, from
            layers that hand no keywords on.
        scaling, dropout, sliding_window, softcap, s_aux: as the model passes them.
        paged: the step, of all layers or as this one sees it.

    Returns:
        ``[1, T, H, Dv]`` and None (no attention weights).

    Raises:
        ValueError: no ``paged`` keyword, a mask, dropout, or a batch that is not flattened.
        Written: of a step that only writes.
    """
    if isinstance(attention_mask, PagedStep | PagedLayer):
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
    if isinstance(paged, PagedStep):
        paged = paged.of_layer(int(module.layer_idx))  # type: ignore[arg-type]
    key_slots, value_slots, key_scale, value_scale = paged[2:]
    projection = None
    if value_slots is None:
        query, projection = absorb(module, query)
    metadata, window = paged.seen_through(sliding_window)
    given = (
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        None if value_slots is None else value[0].transpose(0, 1),
        key_slots,
        value_slots,
    )
    if paged.only_writes:
        scoring = Scoring(scaling, window=window, softcap=softcap, sinks=s_aux)
        check(*given, metadata, scoring, key_scale, value_scale, projection)
        write_tokens(*given[1:], metadata.slot_mapping, key_scale, value_scale)
        raise Written
    out = unified_attention(
        *given,
        scaling,
        metadata,
        sliding_window=window,
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
