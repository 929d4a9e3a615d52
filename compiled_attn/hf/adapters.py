"""Models that peft has wrapped: the model inside, and which adapters are active in it."""

from __future__ import annotations

from typing import Any

from torch import nn

from compiled_attn.errors import ModelRefused

__all__ = ["ActiveAdapters", "unwrapped"]

_STATE = ("_active_adapter", "_disable_adapters", "merged_adapters")
"""Attributes of a peft layer that decide what it computes."""


def unwrapped(model: Any) -> Any:
    """The model of transformers inside of a ``PeftModel``, with its adapters; any other as it is.

    Raises:
        ModelRefused: the active adapter is no part of the layers: prompts and prefixes are added by
            the wrapper.
    """
    if not (hasattr(model, "peft_config") and hasattr(model, "get_base_model")):
        return model
    config = model.peft_config.get(getattr(model, "active_adapter", None))
    if getattr(config, "is_prompt_learning", False):
        kind = getattr(config, "peft_type", type(config).__name__)
        raise ModelRefused(
            "expected an adapter whose weights are in the layers (such as LoRA), got one of type "
            f"{kind}, which adds tokens of its own: merge it, or take another adapter"
        )
    return model.get_base_model()


class ActiveAdapters:
    """The adapters that were active in a model; comparing them costs microseconds.

    Args:
        model: any module.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers = [m.__dict__ for m in model.modules() if "_active_adapter" in m.__dict__]
        self._before = [*map(_state_of, self._layers)]

    def have_changed(self) -> bool:
        """Whether another adapter is active now, or one was merged or switched off."""
        return bool(self._layers) and [*map(_state_of, self._layers)] != self._before


def _state_of(layer: dict[str, Any]) -> list[Any]:
    return [[*value] if isinstance(value := layer.get(name), list) else value for name in _STATE]
