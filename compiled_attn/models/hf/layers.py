"""Wraps the forwards of the decoder layers of a Hugging Face model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import MethodType
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from compiled_attn.attention.metadata import KeyRanks, UnifiedMetadata
from compiled_attn.cache.slot_shadow import LayerShadow, StepShadow
from compiled_attn.models.hf.attention import PagedLayer, PagedStep
from compiled_attn.models.hf.states.carrier import StepStates
from graphs.torch_internals.regions import Region

__all__ = ["call_through", "carrying", "decoder_layers", "layer_region", "restore"]


def decoder_layers(model: PreTrainedModel, attentions: Sequence[nn.Module] = ()) -> list[nn.Module]:
    """Returns the repeated layers of the decoder; none if the model has no list of that length.

    ``attentions``: modules that must be in them, as a vision tower may have as many layers.
    """
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    lists = [part for part in model.modules() if isinstance(part, nn.ModuleList)]
    required = set(attentions)
    fitting = (part for part in lists if len(part) == count and required <= {*part.modules()})
    return [*next(fitting, ())]


def call_through(
    layer: nn.Module,
    place: int,
    numbers: tuple[int, ...],
    region: Region,
    *,
    is_last: bool,
    carrier: str | None = None,
) -> None:
    """Wraps the forward of a decoder layer, which then gets the step as this layer sees it.

    ``place`` is its index among the decoder layers, ``numbers`` its layers in the cache: if there
    are several, each attention looks up its own. The last layer computes only the rows that need
    logits, if the step names them. ``carrier`` is the argument for a cache of a model with states:
    the layer gets its own there, or None.
    """
    plain = region.function

    def forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        step: PagedStep | None = kwargs.get("paged")
        has_states = False
        if carrier is not None and isinstance(cache := kwargs.get(carrier), StepStates):
            step = cache.paged if step is None else step
            kwargs[carrier] = states = cache.paged.states_of(place)
            has_states = states is not None
        if step is None:
            return plain(layer, *args, **kwargs)
        if has_states:
            # Not a region, in which torch refuses ops that write to an argument.
            step = replace(step, regions=None, packed=None)
        if "paged" in kwargs:
            if len(numbers) == 1:
                kwargs["paged"] = step.of_layer(numbers[0])
            elif not numbers and carrier is not None:
                del kwargs["paged"]
        if step.regions is None:
            return plain(layer, *args, **kwargs)
        return region(step.regions[place], layer, *args, **kwargs)

    layer.forward = MethodType(_for_logits(forward) if is_last else forward, layer)


@contextlib.contextmanager
def carrying(layers: Sequence[nn.Module], put: Callable[[dict[str, Any]], None]) -> Iterator[None]:
    """Context in which ``put`` may change the keywords that layers are called with."""

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
    """Restores an attribute of a module, or deletes it if it had none."""
    if value is None:
        module.__dict__.pop(name, None)
    else:
        setattr(module, name, value)


def layer_region(carries: bool) -> Region:
    """Returns the region that calls decoder layers in a graph.

    Args:
        carries: the layers do not forward keywords to their attention: pass ``paged`` as the mask,
            which they do forward, and which nothing else uses.
    """
    plain = _carrying_forward if carries else _forward
    return Region(plain, (PagedLayer, UnifiedMetadata, KeyRanks, LayerShadow, StepShadow))


def _forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(layer).forward(layer, *args, **kwargs)


def _carrying_forward(layer: nn.Module, *args: Any, paged: Any = None, **kwargs: Any) -> Any:
    if paged is not None:
        kwargs["attention_mask"] = paged
    return type(layer).forward(layer, *args, **kwargs)


# Arguments of a layer with one row per token, besides its first one. If another one has such a
# shape, it is not cut: then the trial of the model fails, or it does not matter.
_PER_TOKEN = ("hidden_states", "position_ids", "position_embeddings")


def _for_logits(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the forward of the last layer to compute only the rows that need logits.

    All tokens must leave their keys and values in the cache, but of a prompt chunk one row needs
    logits. So the layer runs twice: with all rows, of which only the K/V writes are used, and with
    the rows that need logits, each as a request of one token. A compiler eliminates the rest of the
    first run. With N layers that saves nearly 1/N of a prefill.
    """

    def call(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        step: PagedStep | None = kwargs.get("paged")
        if step is None or step.logits is None:
            return forward(layer, *args, **kwargs)
        # Not a region, whose dead code the compiler would keep.
        writing = replace(step, only_writes=True, regions=None, packed=None)
        forward(layer, *args, **{**kwargs, "paged": writing})
        rows, few = step.logits
        tokens = len(step.by_window[None].slot_mapping)
        args = tuple(_select(value, rows, tokens) for value in args[:1]) + args[1:]
        for name in _PER_TOKEN:
            if name in kwargs:
                kwargs[name] = _select(kwargs[name], rows, tokens)
        return forward(layer, *args, **{**kwargs, "paged": few})

    return call


def _select(value: Any, rows: Tensor, tokens: int) -> Any:
    """Selects rows of tensors ``[1, tokens, ...]``; returns anything else as it is."""
    if isinstance(value, tuple | list):
        return type(value)(_select(each, rows, tokens) for each in value)
    if isinstance(value, Tensor) and value.dim() > 1 and value.shape[:2] == (1, tokens):
        return value[:, rows]
    return value
