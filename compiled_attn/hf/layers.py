"""The decoder layers of a Hugging Face model, each called through a function of ours."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from compiled_attn.hf.last_layer import in_two_passes

__all__ = ["call_through", "carrying", "decoder_layers", "restore"]


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
    layer: nn.Module, number: int | None, *, carries: bool, is_region: bool, is_last: bool
) -> None:
    """Calls the layer through a function of ours, with the step as this layer sees it.

    Args:
        layer: a decoder layer.
        number: of its keys and values in the cache; None: it has not one attention, and each asks
            for its own.
        carries: it does not hand keywords on to its attention. The keyword ``paged`` then goes in
            the place of the mask, which it does hand on, and which nothing else uses.
        is_region: a graph that contains it traces and compiles it once for all layers that are
            alike. Torch refuses that of layers that keep tensors for later ones.
        is_last: it computes only the rows whose logits are wanted where the step names them.
    """
    as_is = _carrying_forward if carries else _forward
    region = _REGIONS[as_is] if is_region else as_is
    plain, forward = (
        each if number is None else _seen_by(number, each) for each in (as_is, region)
    )
    layer.forward = MethodType(in_two_passes(forward, plain) if is_last else forward, layer)


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


def _seen_by(number: int, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Hands a layer the step as it sees it, in place of that of all layers."""

    def seen(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if (step := kwargs.get("paged")) is not None:
            kwargs["paged"] = step.of_layer(number)
        return forward(layer, *args, **kwargs)

    return seen


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
