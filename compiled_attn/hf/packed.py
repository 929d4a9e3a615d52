"""The linear layers of a model with packed weights, in place of its own.

The parameters stay the model's, in another order: no memory is needed twice. What goes in and out
by ``state_dict`` has the order of plain weights.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter, functional

from compiled_attn.hf.layers import restore
from compiled_attn.ops import load, packed_linear

__all__ = [
    "PackedEmbedding",
    "PackedLinear",
    "pack_linears",
    "packable",
    "packed_weights",
    "plain_layers",
]

Wanted = Callable[[Tensor], bool]


class _Packed(nn.Module):
    """A layer of a packed ``weight``, which `state_dict` gives and takes as a plain one."""

    weight: Tensor

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = packed_linear.unpack(self.weight.detach())

    def _load_from_state_dict(self, state: Any, prefix: str, *others: Any) -> None:
        name = f"{prefix}weight"
        plain = state.get(name)
        panels, pairs, *tile = self.weight.shape
        if plain is not None and plain.shape == (panels * tile[0], pairs * tile[1]):
            state = {**state, name: packed_linear.arranged(plain.to(self.weight))}
        # or else torch says what does not fit
        super()._load_from_state_dict(state, prefix, *others)


class PackedLinear(_Packed):
    """A linear layer through the op ``packed_linear``.

    Args:
        linear: the layer that it takes the place of; its weight is packed already.

    Shape:
        - forward(``[..., in_features]``) -> ``[..., out_features]``
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        load()

    def forward(self, input: Tensor) -> Tensor:
        """The layer's output."""
        # The op has no backward; and a weight may have been cast since, to compare.
        if self.weight.dtype is not torch.bfloat16 or self._wants_gradients(input):
            return self.plain(input)
        rows = input.reshape(-1, self.in_features).contiguous()
        out = torch.ops.compiled_attn.packed_linear(rows, self.weight, self.bias)
        shaped: Tensor = out.view(*input.shape[:-1], self.out_features)
        return shaped

    def _wants_gradients(self, input: Tensor) -> bool:
        own = input, self.weight, self.bias
        return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in own)

    def plain(self, input: Tensor) -> Tensor:
        """The output of a plain layer of the same weight, which is unpacked for this call."""
        return functional.linear(input, packed_linear.unpack(self.weight), self.bias)

    def extra_repr(self) -> str:
        """Sizes, as `torch.nn.Linear` has them."""
        return f"in_features={self.in_features}, out_features={self.out_features}"


class PackedEmbedding(_Packed):
    """An embedding whose weight is that of a packed head.

    Args:
        embedding: the layer that it takes the place of; its weight is packed already.

    Shape:
        - forward(ids ``[...]``) -> ``[..., embedding_dim]``
    """

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = embedding.num_embeddings, embedding.embedding_dim
        self.weight = embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        """The rows of the ids."""
        return packed_linear.rows(self.weight, ids)


def pack_linears(
    model: nn.Module, undo: contextlib.ExitStack, wanted: Wanted = packed_linear.can_pack
) -> None:
    """Packs the weights of a model's linear layers, each where it is.

    Left alone are weights that the op does not take, that something else than linear layers and
    embeddings of torch's own classes has (adapters, quantised layers, scaled embeddings), and
    layers with hooks.

    Args:
        model: is changed; where gradients are wanted, its layers compute as plain ones.
        undo: gets what makes the model what it was.
        wanted: whether a weight ``[N, K]`` is to be packed, of those that can be.
    """
    homes, owners = _homes(model), _owners(model)
    for parameter in packable(model):
        if not wanted(parameter):
            continue
        places = owners[parameter.data_ptr()]
        undo.callback(_unpack, parameter)
        parameter.data = packed_linear.pack(parameter.detach())
        for _, module in places:
            _replace(module, homes[id(module)], undo)


@contextlib.contextmanager
def plain_layers(model: nn.Module) -> Iterator[None]:
    """Let packed layers compute as plain ones, whose weights are there twice one at a time."""
    with contextlib.ExitStack() as undo:
        for module in model.modules():
            if isinstance(module, PackedLinear):
                undo.callback(restore, module, "forward", module.__dict__.get("forward"))
                module.forward = MethodType(PackedLinear.plain, module)  # type: ignore[method-assign]
        yield


def packed_weights(model: nn.Module) -> int:
    """How many weights of a model are packed."""
    return len({id(m.weight) for m in model.modules() if isinstance(m, PackedLinear)})


def packable(model: nn.Module) -> list[Parameter]:
    """The weights of a model that `pack_linears` would pack."""
    return [
        owners[0][0]
        for owners in _owners(model).values()
        if len({id(parameter) for parameter, _ in owners}) == 1  # or else one would stay behind
        and packed_linear.can_pack(owners[0][0])
        and any(type(module) is nn.Linear for _, module in owners)
        and all(_is_plain(module) for _, module in owners)
    ]


def _owners(model: nn.Module) -> dict[int, list[tuple[Parameter, nn.Module]]]:
    """For each memory of parameters, these and the modules that have them."""
    owners = defaultdict(list)
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners[parameter.data_ptr()].append((parameter, module))
    return owners


def _homes(model: nn.Module) -> dict[int, list[tuple[dict[str, Any], str]]]:
    """Where each module hangs, by its id."""
    homes = defaultdict(list)
    for parent in model.modules():
        for name, child in parent._modules.items():
            homes[id(child)].append((parent._modules, name))
    return homes


def _is_plain(module: nn.Module) -> bool:
    if module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__:
        return False
    is_embedding = type(module) is nn.Embedding and module.max_norm is None
    return is_embedding or type(module) is nn.Linear


def _replace(
    module: nn.Module, places: list[tuple[dict[str, Any], str]], undo: contextlib.ExitStack
) -> None:
    kind: Any = PackedLinear if isinstance(module, nn.Linear) else PackedEmbedding
    packed: nn.Module = kind(module)
    packed.train(module.training)
    for children, name in places:
        undo.callback(children.__setitem__, name, module)
        children[name] = packed


def _unpack(parameter: Parameter) -> None:
    if parameter.dim() == 2:
        return  # it was never packed: an interrupt came first
    parameter.data = packed_linear.unpack(parameter.detach())
