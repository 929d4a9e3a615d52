"""Cache shapes and visible tokens of the layers of a model, found by a forward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from compiled_attn.cache.kv_cache import KVShape, NearLayers, PagedKVCache
from compiled_attn.cache.state_cache import StateCache
from compiled_attn.models.hf.attention import latent_shape
from compiled_attn.models.hf.recorder import AttentionCall, record
from compiled_attn.models.hf.refusal import refusal
from compiled_attn.models.hf.states.found import FoundStates, find_mixers
from compiled_attn.models.load import quiet_transformers
from compiled_attn.step import PartsLayout, StepLayout, TableLayout

__all__ = [
    "LayerCalls",
    "cache_for",
    "calls_by_layer",
    "check_fits",
    "check_layout",
    "context_limit",
    "default_layout",
    "layer_calls",
    "numbers_in",
    "numbers_of",
]

_LAST = 2**17
_TWO_THIRDS = _LAST * 2 // 3
_LAYER_TYPES = {"full_attention", "sliding_attention"}
_STATELESS = {"mlp", "moe"}
_CHOOSERS = ("indexer", "compressor")


def _mask_problem(call: AttentionCall) -> str | None:
    """Describes a mask that differs from the ``sliding_window`` of its call; None: it does not.

    Short prompts do not show the difference, so the mask function is evaluated at far positions.
    """
    if not call.has_mask:
        return None
    if call.sees is None:
        return "that builds a mask of its own"
    keys = torch.arange(_LAST + 2, device=call.query.device)
    queries = torch.tensor([0, 1, _TWO_THIRDS, _LAST], device=keys.device).unsqueeze(1)
    zero = torch.zeros((), dtype=torch.int64, device=keys.device)
    try:
        seen = call.sees(zero, zero, queries, keys)
    except Exception:  # it indexes a tensor of the three tokens
        return "whose mask depends on the tokens"
    distance = queries - keys
    expected = (distance >= 0) & (distance < (call.window or _LAST + 1))
    if not torch.equal(torch.broadcast_to(seen, expected.shape), expected):
        expected_range = f"a window of {call.window}" if call.window else "all before it"
        return f"that sees other tokens than {expected_range}"
    return None


def _evicting_layer(model: PreTrainedModel, calls: Sequence[AttentionCall]) -> str | None:
    """Describes a layer that sees more than transformers' own cache stores; None: there is none.

    `generate`, which uses that cache, then returns other tokens than the model without it.
    """
    try:
        layers = DynamicCache(config=model.config).layers
    except Exception:  # some configurations have no cache, which then evicts nothing
        return None
    for call in calls:
        number = call.layer or 0
        window = getattr(layers[number], "sliding_window", None) if number < len(layers) else None
        if window is not None and (call.window or _LAST) > window:
            sees = f"a window of {call.window}" if call.window else "all before it"
            return f"whose layer {number} sees {sees}, while its own cache stores {window} tokens"
    return None


def cache_for(
    model: PreTrainedModel,
    num_blocks: int,
    block_size: int,
    *,
    dtype: torch.dtype | None = None,
    near_blocks: int | None = None,
    state_slots: int = 2,
    latents: bool = True,
) -> PagedKVCache:
    """Creates a `PagedKVCache` for the layers of a Hugging Face model, with its states if any.

    Runs the model on three tokens: heads and head sizes may differ between layers and between keys
    and values, and layers that attend to the keys of another one have no buffers. Multi-head latent
    attention stores one head of latents instead of all expanded keys and values.

    Args:
        model: a causal LM; it is left unchanged.
        num_blocks, block_size: see `PagedKVCache`.
        dtype: dtype of the cache; None: that of the weights.
        near_blocks: blocks of windowed layers, see `NearLayers`, if only some layers are; None: as
            many as of the others. With states all layers have all blocks.
        state_slots: slots of each state, the null slot included: one more than the requests that
            run at a time, and more for stored prefixes. Only for models with states.
        latents: False: multi-head latent attention stores all expanded keys and values.

    Raises:
        ValueError: the sizes are too small.
        ModelRefused: it cannot run on a paged cache, see `PagedCausalLM`.
    """
    calls, states = layer_calls(model)
    shapes, windows = _shapes(calls, latents), [call.window or 0 for call in calls]
    return PagedKVCache(
        len(shapes),
        num_blocks,
        block_size,
        shapes[0].num_kv_heads if shapes else 1,
        max((shape.head_dim for shape in shapes), default=1),
        dtype=dtype or model.dtype,
        device=model.device,
        has_value=any(shape.value_dim for shape in shapes),
        shapes=shapes,
        window=max(windows) if all(windows) and not states else None,
        near=None if near_blocks is None or states else _near(shapes, windows, near_blocks),
        states=None if states is None else StateCache(states.shapes, state_slots, model.device),
    )


def _near(shapes: Sequence[KVShape], windows: Sequence[int], blocks: int) -> NearLayers | None:
    layers = tuple(layer for layer, window in enumerate(windows) if window)
    shared = [(layer, same) for layer, (*_, same) in enumerate(shapes) if same is not None]
    if len(layers) in (0, len(windows)) or any((a in layers) != (b in layers) for a, b in shared):
        return None
    return NearLayers(layers, max(windows), blocks)


class LayerCalls(NamedTuple):
    """What the layers of a model do in a step besides computing each token alone.

    Args:
        attention: attention calls, in the order of the cache's layers.
        states: the states of its layers, or None.
    """

    attention: list[AttentionCall]
    states: FoundStates | None


def calls_by_layer(model: PreTrainedModel) -> list[AttentionCall]:
    """Returns the attention call of each layer that has one, see `layer_calls`."""
    return layer_calls(model).attention


def layer_calls(model: PreTrainedModel) -> LayerCalls:
    """Returns the attention call and the states of each layer.

    Raises:
        ModelRefused: a layer makes no call or several, or one that a paged cache cannot serve; or
            it keeps a state in a way that is not known.
    """
    config = model.config.get_text_config()
    mixers = find_mixers(model)
    places = {mixer.place for mixer in mixers}
    kinds = [*(getattr(config, "layer_types", None) or ())]
    other = {kind for place, kind in enumerate(kinds) if place not in places}
    if unknown := sorted(other - _LAYER_TYPES - _STATELESS):
        raise refusal(model, f"with layers of type {', '.join(unknown)}")
    if getattr(model.config, "is_encoder_decoder", False):
        raise refusal(model, "which is an encoder-decoder")
    with quiet_transformers():
        calls, states = record(model, mixers)
    if not calls and not places:
        if getattr(model, "_can_set_attn_implementation", lambda: True)():
            reason = "whose layers never call it (recurrent layers, or attention code of their own)"
        else:
            reason = "with attention code of its own, which does not use AttentionInterface"
        raise refusal(model, reason)
    for call in calls:
        if problem := _problem(call):
            raise refusal(model, f"with {type(call.module).__name__} {problem}")
    counts = Counter(call.layer for call in calls)
    several = {layer: times for layer, times in counts.items() if times > 1}
    if several:
        raise refusal(model, f"with several calls a step of layers {several}")
    ordered = sorted(calls, key=lambda call: call.layer or 0)
    count = max(config.num_hidden_layers, len(counts))
    alone = {place for place, kind in enumerate(kinds) if kind in _STATELESS}
    missing = sorted({*range(count)} - {*counts} - places - alone)
    if missing:
        raise refusal(model, f"with other layers {missing}")
    if problem := _evicting_layer(model, ordered):
        raise refusal(model, problem)
    return LayerCalls(ordered, states)


def check_fits(model: PreTrainedModel, calls: LayerCalls, cache: PagedKVCache) -> None:
    """Raises ValueError unless each layer of the cache has the shape of its call."""
    has_latents = any(not cache.stores_value(layer) for layer in range(cache.num_layers))
    shapes = _shapes(calls.attention, has_latents)
    for layer in range(max(len(shapes), cache.num_layers)):
        got = cache.shapes[layer][:3] if layer < cache.num_layers else None
        expected = shapes[layer][:3] if layer < len(shapes) else None
        if got != expected:
            raise ValueError(
                f"expected a cache of (heads, key, value) {expected} for layer {layer} of a "
                f"{type(model).__name__}, got {got}: create it with cache_for"
            )
    wanted = None if calls.states is None else calls.states.shapes
    given = None if cache.states is None else cache.states.shapes
    if given != wanted:
        raise ValueError(
            f"expected a cache with the states {wanted} of a {type(model).__name__}, got {given}: "
            "create it with cache_for"
        )


def numbers_of(calls: Sequence[AttentionCall]) -> tuple[int, ...] | None:
    """Returns the ``layer_idx`` of each layer of the cache; None: they are equal."""
    numbers = tuple(call.layer or 0 for call in calls)
    return None if numbers == tuple(range(len(calls))) else numbers


def numbers_in(calls: Sequence[AttentionCall], place: int, layer: nn.Module) -> tuple[int, ...]:
    """Returns the layers of the cache whose calls a decoder layer makes."""
    parts = {*layer.modules()}
    return tuple(
        number
        for number, call in enumerate(calls)
        if call.module in parts and call.number in (None, place)
    )


def default_layout(cache: PagedKVCache) -> StepLayout:
    """Returns the layout of steps for plain torch, or that of the ops if there are states."""
    if cache.states is None:
        return PartsLayout(cache.num_blocks, cache.block_size)
    return TableLayout(cache.num_blocks, cache.block_size, has_states=True)


def check_layout(model: PreTrainedModel, cache: PagedKVCache, layout: StepLayout) -> None:
    """Raises ModelRefused if there are states, and the ops or steps of the layout have none."""
    if cache.states is None:
        return
    if model.device.type != "cpu":
        raise refusal(model, f"with states on {model.device.type}, which are computed on CPUs only")
    if not getattr(layout, "has_states", False):
        raise refusal(model, "with states and steps without their slots (use kernel 'native')")


def _shapes(calls: Sequence[AttentionCall], latents: bool) -> list[KVShape]:
    shapes = []
    for layer, call in enumerate(calls):
        plain = KVShape(call.key.shape[1], call.key.shape[3], call.value.shape[3])
        same = next((first for first in range(layer) if _is_same(call, calls[first])), None)
        latent = latent_shape(call.module) if latents else None
        shapes.append((latent or plain)._replace(same_as=same))
    return shapes


def _is_same(call: AttentionCall, other: AttentionCall) -> bool:
    """Whether a call passes the same keys and values as another one."""
    both = (call.key, other.key), (call.value, other.value)
    return all(
        a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()
        for a, b in both
    )


def _problem(call: AttentionCall) -> str | None:
    query, key, value = call.query.shape, call.key.shape, call.value.shape
    if call.layer is None:
        return "that has no layer_idx"
    if len(query) != 4 or key[:1] + key[2:] != query[:1] + query[2:] or value[:3] != key[:3]:
        return f"that attends with query {[*query]} to keys {[*key]} and values {[*value]}"
    if query[1] % key[1]:
        return f"of {query[1]} query heads on {key[1]} key heads"
    if choosers := [name for name in _CHOOSERS if getattr(call.module, name, None) is not None]:
        return f"that chooses tokens with its {choosers[0]}"
    if call.others:
        return f"that also passes {', '.join(call.others)}"
    return _mask_problem(call)


def context_limit(model: PreTrainedModel) -> int | None:
    """Returns the longest prompt plus generation that the model can serve; None: no limit.

    That is ``max_position_embeddings``. The rotary types "dynamic" and "longrope" rotate *all*
    tokens of a step differently once one of them exceeds the length of training. A long request
    would change others, so the limit is that length.
    """
    config = model.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    limits = [limit] if limit and limit > 0 else []
    for rope in _ropes(getattr(config, "rope_parameters", None)):
        kind = rope.get("rope_type", "default")
        trained = rope.get("original_max_position_embeddings") or limit
        if trained and ("dynamic" in kind or kind == "longrope"):
            limits.append(trained)
    return min(map(int, limits), default=None)


def _ropes(parameters: Any) -> Iterator[Mapping[str, Any]]:
    if not isinstance(parameters, Mapping):
        return
    if "rope_type" in parameters:
        yield parameters
    for nested in parameters.values():
        yield from _ropes(nested)
