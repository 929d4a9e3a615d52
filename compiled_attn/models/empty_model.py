"""Models without memory, whose weights are set one by one."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from compiled_attn.errors import ModelError
from compiled_attn.models.packed_weight import WriteTrap
from compiled_attn.models.quantised_layers import QuantisedEmbedding, QuantisedLinear
from compiled_attn.ops.quantised_linear import QuantisedWeight
from graphs.installation import install_command

__all__ = ["EmptyWeights", "empty_model", "in_tensor"]


def empty_model(config: Any, dtype: torch.dtype) -> Any:
    """Builds the causal language model of a configuration; only its buffers have memory.

    Raises:
        ModelError: accelerate is not installed.
    """
    try:
        from accelerate import init_empty_weights  # type: ignore[import-untyped]
    except ImportError as error:
        raise ModelError(
            "files of quantised weights need accelerate, which is not installed: "
            f"{install_command('gguf')}"
        ) from error
    from transformers import AutoModelForCausalLM

    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()
    return model


@contextmanager
def in_tensor(source: Path, tensor: str) -> Iterator[None]:
    """Names the model and the tensor in errors about its contents."""
    try:
        yield
    except ModelError:
        raise
    except (ValueError, TypeError, LookupError, ArithmeticError, RuntimeError) as error:
        reason = textwrap.shorten(str(error) or type(error).__name__, 200, placeholder=" ...")
        raise ModelError(
            f"model {source}: tensor {tensor}: {reason}: it is damaged, or does not fit its "
            "configuration: download it again"
        ) from error


class EmptyWeights:
    """The parameters of a model without memory, which are replaced one by one."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._trap = model, WriteTrap()
        self._replaced: dict[nn.Module, nn.Module] = {}
        self._owners: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    self._owners.setdefault(id(parameter), []).append((module, name))
        self._by_name = dict(model.named_parameters(remove_duplicate=False))

    @property
    def names(self) -> Collection[str]:
        """Names of all parameters, also of those that are shared."""
        return self._by_name.keys()

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def _owners_of(self, name: str) -> list[tuple[nn.Module, str]]:
        return self._owners[id(self._by_name[name])]

    def can_quantise(self, name: str) -> bool:
        """Whether a parameter is the weight of plain layers, which can be packed by its shape."""
        outputs, inputs = (*self._by_name[name].shape, 0, 0)[:2]
        return (
            outputs % 16 == 0
            and inputs > 0
            and inputs % 32 == 0
            and all(type(owner) in (nn.Linear, nn.Embedding) for owner, _ in self._owners_of(name))
        )

    def put(self, name: str, value: Tensor) -> None:
        """Sets a parameter in all its owners."""
        shape = self._by_name[name].shape
        if value.shape != shape:
            raise ValueError(f"expected shape {[*shape]}, got {[*value.shape]}")
        parameter = Parameter(value.contiguous(), requires_grad=False)
        for owner, own_name in self._owners_of(name):
            self._replaced.get(owner, owner)._parameters[own_name] = parameter

    def quantise(self, name: str, weight: QuantisedWeight, format: str, **settings: Any) -> None:
        """Replaces the layers that own a parameter by quantised ones, see `QuantisedLayer`."""
        shape = self._by_name[name].shape
        if weight.shape != (*shape,):
            raise ValueError(f"expected shape {[*shape]}, got {[*weight.shape]}")
        one = torch.empty(1, dtype=self._by_name[name].dtype)
        parameter = Parameter(one.expand(shape), False)
        self._trap.hide(parameter)
        for owner, _ in self._owners_of(name):
            owner._parameters["weight"] = parameter
            kind: Any = QuantisedLinear if isinstance(owner, nn.Linear) else QuantisedEmbedding
            layer = kind(owner, weight, self._trap, format, **settings).train(owner.training)
            self._replaced[owner] = layer
            for parent in [*self._model.modules()]:
                for child_name, child in parent._modules.items():
                    if child is owner:
                        parent._modules[child_name] = layer

    def missing(self) -> list[str]:
        """Names of the parameters that have no memory yet."""
        found = self._model.named_parameters()
        return sorted(name for name, parameter in found if parameter.device.type == "meta")
