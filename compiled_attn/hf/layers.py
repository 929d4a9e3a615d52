"""The decoder layers of a Hugging Face model, each called through a function of ours."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import MethodType
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from compiled_attn.attention.metadata import KeyRanks, UnifiedMetadata
from compiled_attn.hf.attention import PagedLayer, PagedStep
from compiled_attn.hf.last_layer import in_two_passes
from graphs.torch_internals.regions import Region

__all__ = ["call_through", "carrying", "decoder_layers", "layer_region", "restore"]


def decoder_layers(model: PreTrainedModel, attentions: Sequence[nn.Module] = ()) -> list[nn.Module]:
    """The repeated layers of the decoder: none where the model has no list of that length.

    ``attentions``: modules that lie in them, where a tower of another kind has as many layers.
    """
    count = model.config.get_text_config().num_hidden_layers
    lists = [part for part in model.modules() if isinstance(part, nn.ModuleList)]
    wanted = set(attentions)
    fitting = (part for part in lists if len(part) == count and wanted <= {*part.modules()})
    return [*next(fitting, ())]


def call_through(
    layer: nn.Module, place: int, number: int | None, region: Region, *, is_last: bool
) -> None:
    """Calls the layer through a function of ours, with the step as this layer sees it.

    Args:
        layer: a decoder layer.
        place: of the layer among the decoder layers.
        number: of its keys and values in the cache; None: it has not one attention, and each asks
            for its own.
        region: how it is called, see `layer_region`.
        is_last: it computes only the rows whose logits are wanted where the step names them.
    """
    plain = region.function

    def forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        step: PagedStep | None = kwargs.get("paged")
        if step is None:
            return plain(layer, *args, **kwargs)
        if number is not None:
            kwargs["paged"] = step.of_layer(number)
        if step.regions is None:
            return plain(layer, *args, **kwargs)
        return region(step.regions[place], layer, *args, **kwargs)

    layer.forward = MethodType(in_two_passes(forward) if is_last else forward, layer)


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


def layer_region(carries: bool) -> Region:
    """How decoder layers are called in a graph.

    Args:
        carries: they do not hand keywords on to their attention. The keyword ``paged`` then goes in
            the place of the mask, which they do hand on, and which nothing else uses.
    """
    plain = _carrying_forward if carries else _forward
    return Region(plain, (PagedLayer, UnifiedMetadata, KeyRanks))


def _forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(layer).forward(layer, *args, **kwargs)


def _carrying_forward(layer: nn.Module, *args: Any, paged: Any = None, **kwargs: Any) -> Any:
    if paged is not None:
        kwargs["attention_mask"] = paged
    return type(layer).forward(layer, *args, **kwargs)
