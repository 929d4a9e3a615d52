"""A snapshot of a served model, to tell whether it is still what was warmed up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import is_, itemgetter
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from compiled_attn.errors import ModelChanged

__all__ = ["ModelChanged", "Snapshot"]

_config, _training = itemgetter("config"), itemgetter("training")


class Snapshot:
    """What of a model must stay, taken when it was right; comparing it costs microseconds.

    Watched: the attention of every configuration in it and the configuration that each attention
    module holds; training mode and forwards of the decoder layers and of the attention modules; the
    object of each parameter; the address of one parameter a decoder layer, which a cast or a move
    changes. Values of parameters are not: no backend keeps a copy of them. Other storage of a
    single parameter is left to the graphs: `graphs.StaleGraph` where they hold addresses, a changed
    guard where they are compiled; else they read what is there now.

    Args:
        model: the model.
        layers: its decoder layers.
        attentions: its attention modules.
    """

    def __init__(
        self, model: PreTrainedModel, layers: Sequence[nn.Module], attentions: Sequence[nn.Module]
    ) -> None:
        self._configs = _configs_of(model)
        self._implementations = [_attention_of(config) for config in self._configs]
        self._holders = [m.__dict__ for m in attentions if "config" in m.__dict__]
        self._held = [*map(_config, self._holders)]
        self._modes = [each.__dict__ for each in (model, *layers, *attentions)]
        self._forwards = [each.get("forward") for each in self._modes]
        self._names, self._owners, self._parameters = _parameters_of(model)
        self._samples = [*_samples_of(model, layers)]
        self._addresses = [*map(Tensor.data_ptr, self._samples)]

    def difference(self) -> str | None:
        """What changed, and the remedy; None: nothing that is watched."""
        for config, before in zip(self._configs, self._implementations, strict=True):
            if (now := _attention_of(config)) != before:
                return (
                    f"its attention is {now!r} and was {before!r}: restore it with "
                    f"model.set_attn_implementation({before!r})"
                )
        if not all(map(is_, map(_config, self._holders), self._held)):
            return "an attention module has another config: put the old one back"
        if True in map(_training, self._modes):
            return "it is in training mode: call model.eval()"
        if [modes.get("forward") for modes in self._modes] != self._forwards:
            return "the forward of a layer was replaced or removed: put the old one back"
        if self._has_other_parameters():
            return f"a parameter was replaced: {_REMEDY}, or write into the old one with copy_()"
        if [*map(Tensor.data_ptr, self._samples)] != self._addresses:
            return f"its parameters were cast or moved: {_REMEDY}"
        return None

    def _has_other_parameters(self) -> bool:
        """Whether a module has another object as a parameter; three times faster than by ``is``."""
        try:
            # Lists compare by identity first. What is not the same compares as a tensor does, which
            # has no truth value as a whole.
            return [*map(dict.get, self._owners, self._names)] != self._parameters
        except (RuntimeError, TypeError):
            return True


_REMEDY = "make a new engine of the model as it is now"


def _configs_of(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """Every configuration that a module of the model, or another configuration, holds."""
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
        yield from (parameter for _, parameter in zip(range(1), part.parameters(), strict=False))
