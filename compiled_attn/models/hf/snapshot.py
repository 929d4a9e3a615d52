"""Detects changes in a model that its captured graphs would not follow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import is_, itemgetter
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from compiled_attn.models.adapters import ActiveAdapters
from compiled_attn.models.packed_weight import PackedWeight
from graphs.capture.module_state import ModuleState

__all__ = ["Snapshot"]

_config, _training = itemgetter("config"), itemgetter("training")
_REMEDY = "create a new engine of the model as it is now"


class Snapshot:
    """The state of a model that must not change while it is served; comparing takes microseconds.

    Watched: the attention implementation of every configuration and the configuration of each
    attention module; training mode and forwards of decoder layers and attention modules; the
    identity of each parameter; the address of one parameter per decoder layer, which a cast or a
    move changes; active peft adapters; writes to weights that are packed as integers, see
    `PackedWeight`; sub-modules, forward hooks and attributes, by a `ModuleState`. Not watched:
    values of parameters, which no backend copies, and new storage of a single parameter, which
    graphs notice themselves (`graphs.StaleGraph`, guards) or read.

    Args:
        model: the model.
        layers: its decoder layers.
        attentions: its attention modules.
    """

    def __init__(
        self, model: PreTrainedModel, layers: Sequence[nn.Module], attentions: Sequence[nn.Module]
    ) -> None:
        self._model, self._layers, self._attentions = model, layers, attentions
        self.take()

    def take(self) -> None:
        """Records the current state of the model."""
        model, layers, attentions = self._model, self._layers, self._attentions
        self._configs = _configs_of(model)
        self._implementations = [_attention_of(config) for config in self._configs]
        self._holders = [m.__dict__ for m in attentions if "config" in m.__dict__]
        self._held = [*map(_config, self._holders)]
        self._modes = [each.__dict__ for each in (model, *layers, *attentions)]
        self._forwards = [each.get("forward") for each in self._modes]
        self._names, self._owners, self._parameters = _parameters_of(model)
        self._traps = {each.trap for each in self._parameters if isinstance(each, PackedWeight)}
        self._samples = [*_samples_of(model, layers)]
        self._addresses = [*map(Tensor.data_ptr, self._samples)]
        self._adapters = ActiveAdapters(model)
        self._state = ModuleState(model)

    def difference(self) -> str | None:
        """Describes the first change found, with a remedy; None: nothing watched has changed."""
        for config, before in zip(self._configs, self._implementations, strict=True):
            if (now := _attention_of(config)) != before:
                return (
                    f"its attention is {now!r} and was {before!r}: restore it with "
                    f"model.set_attn_implementation({before!r})"
                )
        if not all(map(is_, map(_config, self._holders), self._held)):
            return "an attention module has another config: restore the old one"
        if True in map(_training, self._modes):
            return "it is in training mode: call model.eval()"
        if [modes.get("forward") for modes in self._modes] != self._forwards:
            return "the forward of a layer was replaced or removed: restore the old one"
        if any(trap.is_sprung for trap in self._traps):
            return (
                "a packed weight was written to, which changes nothing: load the model again, and "
                "write new values with load_state_dict()"
            )
        if self._has_other_parameters():
            return f"a parameter was replaced: {_REMEDY}, or write into the old one with copy_()"
        if [*map(Tensor.data_ptr, self._samples)] != self._addresses:
            return f"its parameters were cast or moved: {_REMEDY}"
        if self._adapters.have_changed():
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


def _parameters_of(model: nn.Module) -> tuple[list[str], list[dict[str, Any]], list[Tensor]]:
    rows = [
        (name, module._parameters, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]
    names, owners, parameters = zip(*rows, strict=True) if rows else ((), (), ())
    return [*names], [*owners], [*parameters]


def _samples_of(model: nn.Module, layers: Iterable[nn.Module]) -> Iterable[Tensor]:
    for part in (*layers, model):
        # Preferably a plain one: torch handles subclasses slowly.
        yield from sorted(part.parameters(), key=lambda each: isinstance(each, PackedWeight))[:1]
