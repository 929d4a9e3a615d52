"""The shapes of what each layer keeps in a cache, and what it sees, found in a forward instead of a
configuration.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from transformers import DynamicCache, PreTrainedModel

from compiled_attn.cache.kv_cache import KVShape, PagedKVCache
from compiled_attn.hf.attention import latent_shape
from compiled_attn.hf.recorder import AttentionCall, record
from compiled_attn.hf.refused import refused
from compiled_attn.models import quiet_transformers

__all__ = ["cache_for", "calls_by_layer", "check_fits", "forgetting", "other_sight"]

_LAST = 2**17
_TWO_THIRDS = _LAST * 2 // 3
_LAYER_TYPES = {"full_attention", "sliding_attention"}
_CHOOSERS = ("indexer", "compressor")


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


def forgetting(model: PreTrainedModel, calls: Sequence[AttentionCall]) -> str | None:
    """Which layer sees more than transformers' own cache keeps of it; None: none does.

    There `generate`, which uses that cache, gives other tokens than the model without it.
    """
    try:
        kept = DynamicCache(config=model.config).layers
    except Exception:  # not every configuration knows its cache; then nothing is forgotten
        return None
    for number, (call, layer) in enumerate(zip(calls, kept, strict=False)):
        window = getattr(layer, "sliding_window", None)
        if window is not None and (call.window or _LAST) > window:
            sees = f"a window of {call.window}" if call.window else "all before it"
            return f"whose layer {number} sees {sees}, while its own cache keeps {window} tokens"
    return None


def cache_for(
    model: PreTrainedModel,
    num_blocks: int,
    block_size: int,
    *,
    dtype: torch.dtype | None = None,
    latent: bool = True,
) -> PagedKVCache:
    """A `PagedKVCache` with what the layers of a Hugging Face model keep.

    Runs the model on three tokens to see it: heads and head sizes may differ from layer to layer
    and between keys and values, and layers that attend to the keys of another have no buffers.

    Args:
        model: a causal LM; it is left as it was.
        num_blocks, block_size: see `PagedKVCache`.
        dtype: of the cache; None: that of the weights.
        latent: whether layers of multi-head latent attention keep the latents of a token (MLA's
            point: one head instead of all) and not its expanded keys and values.

    Raises:
        ValueError: the sizes are too small.
        ModelRefused: it cannot run on a paged cache, see `PagedCausalLM`.
    """
    shapes = _shapes(calls_by_layer(model), latent)
    return PagedKVCache(
        len(shapes),
        num_blocks,
        block_size,
        shapes[0].num_kv_heads,
        max(shape.head_dim for shape in shapes),
        dtype=dtype or model.dtype,
        device=model.device,
        has_value=any(shape.value_dim for shape in shapes),
        shapes=shapes,
    )


def calls_by_layer(model: PreTrainedModel) -> list[AttentionCall]:
    """The one call of attention of each layer, in the order of the cache's layers.

    Raises:
        ModelRefused: a layer makes no call or several, or one that a paged cache cannot answer.
    """
    config = model.config.get_text_config()
    kinds = sorted(set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES)
    if kinds:
        raise refused(model, f"with layers of type {', '.join(kinds)}")
    if getattr(model.config, "is_encoder_decoder", False):
        raise refused(model, "which is an encoder-decoder")
    with quiet_transformers():
        calls = record(model)
    if not calls:
        raise refused(model, _without_calls(model))
    for call in calls:
        if problem := _problem(call):
            raise refused(model, f"with {type(call.module).__name__} {problem}")
    counts = Counter(call.layer for call in calls)
    several = {layer: times for layer, times in counts.items() if times > 1}
    if several:
        raise refused(model, f"with several calls a step of layers {several}")
    by_layer = {call.layer: call for call in calls}
    missing = sorted(set(range(max(config.num_hidden_layers, len(by_layer)))) - set(by_layer))
    if missing:
        raise refused(model, f"with other layers {missing}")
    ordered = [by_layer[layer] for layer in range(len(by_layer))]
    if forgets := forgetting(model, ordered):
        raise refused(model, forgets)
    return ordered


def _without_calls(model: PreTrainedModel) -> str:
    can_set = getattr(model, "_can_set_attn_implementation", lambda: True)
    if can_set():
        return "whose layers never call it (recurrent layers, or attention code of their own)"
    return "with attention code of its own, which does not go through AttentionInterface"


def check_fits(model: PreTrainedModel, calls: Sequence[AttentionCall], cache: PagedKVCache) -> None:
    """Raises ValueError unless each layer of the cache keeps what its call hands over."""
    possible = [_shapes(calls, latent) for latent in (True, False)]
    for layer in range(max(len(calls), cache.num_layers)):
        kept = cache.shapes[layer][:3] if layer < cache.num_layers else None
        wanted = [shapes[layer][:3] for shapes in possible if layer < len(shapes)]
        if kept not in wanted:
            raise ValueError(
                f"expected a cache that keeps (heads, key, value) {' or '.join(map(str, wanted))} "
                f"of layer {layer} of a {type(model).__name__}, got {kept}: make it with cache_for"
            )


def _shapes(calls: Sequence[AttentionCall], latent: bool) -> list[KVShape]:
    shapes = []
    for layer, call in enumerate(calls):
        own = latent_shape(call.module) if latent else None
        expanded = KVShape(call.key.shape[1], call.key.shape[3], call.value.shape[3])
        same = next((first for first in range(layer) if _is_same(call, calls[first])), None)
        shapes.append((own or expanded)._replace(same_as=same))
    return shapes


def _is_same(call: AttentionCall, other: AttentionCall) -> bool:
    """Whether a call hands over the very keys and values of another, which are still alive."""
    pairs = (call.key, other.key), (call.value, other.value)
    return all(
        a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()
        for a, b in pairs
    )


def _problem(call: AttentionCall) -> str | None:
    """Why the paged attention cannot answer a call; None: it can."""
    query, key, value = call.query.shape, call.key.shape, call.value.shape
    if call.layer is None:
        return "that has no layer_idx"
    if len(query) != 4 or key[:1] + key[2:] != query[:1] + query[2:] or value[:3] != key[:3]:
        return f"that attends with query {[*query]} to keys {[*key]} and values {[*value]}"
    if query[1] % key[1]:
        return f"of {query[1]} query heads on {key[1]} key heads"
    if choosers := [name for name in _CHOOSERS if getattr(call.module, name, None) is not None]:
        return f"that chooses what it sees by its {choosers[0]}"
    if call.others:
        return f"that also passes {', '.join(call.others)}"
    return other_sight(call)
