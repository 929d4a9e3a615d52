"""Detects changes in a model that its captured graphs would not follow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from compiled_attn.models.packed import hidden_weights
from graphs.capture.module_state import ModuleState

__all__ = ["Snapshot"]

_ADAPTER_STATE = ("_active_adapter", "_disable_adapters", "merged_adapters")
"""Attributes of a peft layer that determine its output."""
_REMEDY = "create a new engine of the model as it is now"


class Snapshot:
    """The state of a model that must not change while it is served; comparing takes microseconds.

    Watched: the attention implementation of every configuration; the identity of each parameter;
    the address of one parameter per decoder layer, which a cast or a move changes; active peft
    adapters; writes to weights that are packed as integers, see `WriteTrap`; modules, hooks and
    attributes (mode, forwards and configurations among them), by a `ModuleState`. Not watched:
    values of parameters, which no backend copies, and new storage of a single parameter, which
    graphs notice themselves (`graphs.StaleGraph`, guards) or read.

    Args:
        model: the model.
        layers: its decoder layers.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[nn.Module]) -> None:
        self._model, self._layers = model, layers
        self.take()

    def take(self) -> None:
        """Records the current state of the model."""
        model = self._model
        self._configs = _configs_of(model)
        self._implementations = [_attention_of(config) for config in self._configs]
        self._names, self._owners, self._parameters = _parameters_of(model)
        hidden = hidden_weights(model)
        self._traps, self._hidden = [*hidden], [each for own in hidden.values() for each in own]
        self._hidden_addresses = [at for trap, own in hidden.items() for at in trap.addresses(own)]
        self._samples = [*_samples_of((*self._layers, model), {*map(id, self._hidden)})]
        self._addresses = [*map(Tensor.data_ptr, self._samples)]
        modules = [module.__dict__ for module in model.modules()]
        self._adapters = [own for own in modules if "_active_adapter" in own]
        self._adapter_states = [*map(_adapter_state_of, self._adapters)]
        self._state = ModuleState(model)

    def difference(self) -> str | None:
        """Describes the first change found, with a remedy; None: nothing watched has changed."""
        for config, before in zip(self._configs, self._implementations, strict=True):
            if (now := _attention_of(config)) != before:
                return (
                    f"its attention is {now!r} and was {before!r}: restore it with "
                    f"model.set_attn_implementation({before!r})"
                )
        if self._has_other_parameters():
            return f"a parameter was replaced: {_REMEDY}, or write into the old one with copy_()"
        if [*map(Tensor.data_ptr, self._samples)] != self._addresses:
            return f"its parameters were cast or moved: {_REMEDY}"
        if (
            any(trap.is_sprung for trap in self._traps)
            or [*map(Tensor.data_ptr, self._hidden)] != self._hidden_addresses
        ):
            return (
                "a packed weight was written to, which changes nothing: load the model again, and "
                "write new values with load_state_dict()"
            )
        if self._adapters and [*map(_adapter_state_of, self._adapters)] != self._adapter_states:
            return f"other adapters are active, merged or switched off: {_REMEDY}, or switch back"
        if changed := self._state.changed():
            return f"{changed}: restore it, or {_REMEDY}"
        return None

    def _has_other_parameters(self) -> bool:
        """Whether a parameter was replaced; three times faster than comparing with ``is``."""
        try:
            # Lists compare items by identity first. Other tensors compare element by element, and
            # the result has no truth value.
            return [*map(dict.get, self._owners, self._names)] != self._parameters
        except (RuntimeError, TypeError):
            return True


def _configs_of(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """All configurations held by modules of the model or by other configurations."""
    found: dict[int, PreTrainedConfig] = {}
    waiting = [m.__dict__.get("config") for m in model.modules()]
    while waiting:
        config = waiting.pop()
        if isinstance(config, PreTrainedConfig) and id(config) not in found:
            found[id(config)] = config
            waiting += [getattr(config, name, None) for name in config.sub_configs]
    return [*found.values()]


def _attention_of(config: PreTrainedConfig) -> Any:
    return config.__dict__.get("_attn_implementation_internal")


def _adapter_state_of(layer: dict[str, Any]) -> list[Any]:
    state = map(layer.get, _ADAPTER_STATE)
    return [[*value] if isinstance(value, list) else value for value in state]


def _parameters_of(model: nn.Module) -> tuple[list[str], list[dict[str, Any]], list[Tensor]]:
    rows = [
        (name, module._parameters, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]
    names, owners, parameters = zip(*rows, strict=True) if rows else ((), (), ())
    return [*names], [*owners], [*parameters]


def _samples_of(modules: Iterable[nn.Module], hidden: set[int]) -> Iterable[Tensor]:
    for module in modules:
        yield from [each for each in module.parameters() if id(each) not in hidden][:1]
