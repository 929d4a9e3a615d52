"""Models wrapped by peft: the model inside, and its active adapters."""

from __future__ import annotations

from typing import Any

from torch import nn

from compiled_attn.errors import ModelRefused

__all__ = ["ActiveAdapters", "unwrapped"]

_STATE = ("_active_adapter", "_disable_adapters", "merged_adapters")
"""Attributes of a peft layer that determine its output."""


def unwrapped(model: Any) -> Any:
    """Returns the transformers model inside a ``PeftModel``, with its adapters; others unchanged.

    Raises:
        ModelRefused: the active adapter is not in the layers, as the wrapper adds prompts and
            prefixes.
    """
    if not (hasattr(model, "peft_config") and hasattr(model, "get_base_model")):
        return model
    config = model.peft_config.get(getattr(model, "active_adapter", None))
    if getattr(config, "is_prompt_learning", False):
        kind = getattr(config, "peft_type", type(config).__name__)
        raise ModelRefused(
            "expected an adapter whose weights are in the layers (such as LoRA), got one of type "
            f"{kind}, which adds tokens of its own: merge it, or use another adapter"
        )
    return model.get_base_model()


class ActiveAdapters:
    """The active adapters of a model when this was created; comparing takes microseconds.

    Args:
        model: any module.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers = [m.__dict__ for m in model.modules() if "_active_adapter" in m.__dict__]
        self._before = [*map(_state_of, self._layers)]

    def have_changed(self) -> bool:
        """Whether an adapter was activated, merged or disabled since."""
        return bool(self._layers) and [*map(_state_of, self._layers)] != self._before


def _state_of(layer: dict[str, Any]) -> list[Any]:
    return [[*value] if isinstance(value := layer.get(name), list) else value for name in _STATE]
