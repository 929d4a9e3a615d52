"""The attention of a Hugging Face model over the paged cache, and how a step reaches it.

The layers are regions that a graph compiles once for all that are alike. For multi-head latent
attention the cache keeps what a token's keys and values are made of: the modules of transformers'
DeepSeek family expand the latents ``c [R]`` and the rotated key ``r`` of a token to keys ``[W_k c,
r]`` and values ``W_v c`` of every head, in a method of their own, ``expand_kv``. It is replaced by
one that does not expand; the scores then take ``(W_k^T q_nope) c + q_rope r``, and ``W_v`` is
applied to the sum over tokens. Source: DeepSeek-V2 (2024), 2.1.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from compiled_attn.attention.metadata import UnifiedMetadata
from compiled_attn.attention.unified import unified_attention
from compiled_attn.cache.kv_cache import KVShape, PagedKVCache

__all__ = [
    "ATTENTION_NAME",
    "PagedStep",
    "absorb",
    "call_through",
    "carrying",
    "decoder_layers",
    "keep_latents",
    "latent_shape",
    "paged_attention_forward",
    "reads",
    "restore",
]

ATTENTION_NAME = "compiled_attn"
"""Attention over the paged cache."""


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The repeated layers of the decoder: none where the model has no list of that length."""
    count = model.config.get_text_config().num_hidden_layers
    lists = [part for part in model.modules() if isinstance(part, nn.ModuleList)]
    return next(([*layers] for layers in lists if len(layers) == count), [])


def call_through(layer: nn.Module, *, carries: bool, is_region: bool) -> None:
    """Calls the layer through a function of ours.

    Args:
        layer: a decoder layer.
        carries: it does not hand keywords on to its attention. The keyword ``paged`` then goes in
            the place of the mask, which it does hand on, and which nothing else uses.
        is_region: a graph that contains it compiles it once for all layers that are alike. Torch
            refuses that of layers that keep tensors for later ones.
    """
    forward = _carrying_forward if carries else _forward
    layer.forward = MethodType(_REGIONS[forward] if is_region else forward, layer)


@contextlib.contextmanager
def carrying(layers: Sequence[nn.Module], put: Callable[[dict[str, Any]], None]) -> Iterator[None]:
    """Calls the layers with keywords that ``put`` has changed, for what is inside."""

    def forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        put(kwargs)
        return type(layer).forward(layer, *args, **kwargs)

    before = [layer.__dict__.get("forward") for layer in layers]
    try:
        for layer in layers:
            layer.forward = MethodType(forward, layer)
        yield
    finally:
        for layer, own in zip(layers, before, strict=True):
            restore(layer, "forward", own)


def restore(module: nn.Module, name: str, value: Any) -> None:
    """Gives an object its own attribute back, or takes it away where it had none."""
    if value is None:
        module.__dict__.pop(name, None)
    else:
        setattr(module, name, value)


def _forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(layer).forward(layer, *args, **kwargs)


def _carrying_forward(layer: nn.Module, *args: Any, paged: Any = None, **kwargs: Any) -> Any:
    if paged is not None:
        kwargs["attention_mask"] = paged
    return type(layer).forward(layer, *args, **kwargs)


_REGIONS = {
    forward: torch.compiler.nested_compile_region(forward)
    for forward in (_forward, _carrying_forward)
}


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
            those, ``[1, 1, T, R + rope]``, see `compiled_attn.hf.attention`.
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
