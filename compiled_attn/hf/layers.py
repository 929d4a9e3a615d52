"""The decoder layers of a model: regions that a graph compiles once for all that are alike."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

__all__ = ["carrying", "compile_once_for_all", "decoder_layers", "restore"]


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The repeated layers of the decoder: none where the model has no list of that length."""
    count = model.config.get_text_config().num_hidden_layers
    lists = [part for part in model.modules() if isinstance(part, nn.ModuleList)]
    return next(([*layers] for layers in lists if len(layers) == count), [])


def compile_once_for_all(layer: nn.Module, *, carries: bool) -> None:
    """Lets a graph that contains the layer compile it once for all layers that are alike.

    ``carries``: the layer does not hand keywords on to its attention. The keyword ``paged`` then
    goes in the place of the mask, which it does hand on, and which nothing else uses.
    """
    layer.forward = MethodType(_carrying_region if carries else _region, layer)


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


_region = torch.compiler.nested_compile_region(_forward)
_carrying_region = torch.compiler.nested_compile_region(_carrying_forward)
