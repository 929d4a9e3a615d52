"""The LoRA adapters inside a peft ``PeftModel``, which can be taken out of its layers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from compiled_attn.models.adapters.adapter import Adapter, LoraWeight
from compiled_attn.models.adapters.layers import features_of

__all__ = ["PeftAdapters"]


@dataclass(frozen=True)
class PeftAdapters:
    """The adapters of a ``PeftModel``.

    Args:
        model: the transformers model inside, which contains peft's layers.
        adapters: by the names that they have in the ``PeftModel``.
        default: name of the active one, for requests that name none.
    """

    model: Any
    adapters: Mapping[str, Adapter]
    default: str

    @staticmethod
    def of(model: Any) -> PeftAdapters | None:
        """Returns the adapters of a ``PeftModel``.

        None: it is no ``PeftModel``, or something in it computes more than plain LoRA of linear
        layers with one active adapter (another method, DoRA, merged or disabled adapters).
        """
        if not (hasattr(model, "peft_config") and hasattr(model, "get_base_model")):
            return None
        base = model.get_base_model()
        layers = dict(_layers(base))
        active = {(*layer.active_adapters,) for layer in layers.values()}
        if not all(map(_is_plain_lora, layers.values())) or len(active) != 1:
            return None
        (names,) = active
        adapters = {name: _adapter(name, layers) for name in model.peft_config}
        if len(names) != 1 or not all(each.weights for each in adapters.values()):
            return None
        return PeftAdapters(base, adapters, names[0])

    @contextlib.contextmanager
    def removed(self) -> Iterator[None]:
        """Replaces peft's layers by the layers inside them, and restores them at the end.

        An engine may replace the layers inside meanwhile: peft's layers then get the new ones.
        """
        layers = dict(_layers(self.model))
        for name, layer in layers.items():
            self.model.set_submodule(name, layer.base_layer)
        try:
            yield
        finally:
            for name, layer in layers.items():
                layer.base_layer = self.model.get_submodule(name)
                self.model.set_submodule(name, layer)


def _layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The layers of peft, by an attribute that all of its kinds have."""
    for name, module in model.named_modules():
        if "_active_adapter" in vars(module):
            yield name, module


def _is_plain_lora(layer: Any) -> bool:
    kind = type(layer)
    if (kind.__module__, kind.__name__) != ("peft.tuners.lora.layer", "Linear"):
        return False
    has_more = getattr(layer, "lora_variant", None) or any(
        each.bias is not None for each in layer.lora_B.values()
    )
    is_on = not layer.merged and not layer.disable_adapters
    return is_on and not has_more and features_of(layer.base_layer) is not None


def _adapter(name: str, layers: Mapping[str, Any]) -> Adapter:
    weights = {
        path: LoraWeight(
            layer.lora_A[name].weight.detach(),
            layer.lora_B[name].weight.detach(),
            float(layer.scaling[name]),
        )
        for path, layer in layers.items()
        if name in layer.lora_A
    }
    return Adapter(f"{name!r} of the PeftModel", weights)
