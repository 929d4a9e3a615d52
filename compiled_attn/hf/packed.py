"""The linear layers of a model with packed weights, in place of its own.

The parameters stay the model's, in another order: no memory is needed twice. What goes in and out
by ``state_dict`` has the order of plain weights. In int8 they take half of the memory, and are what
they were but for rounding; so do the upper halves of weights of float32 whose lower ones are zeros,
and those are what they were. Both are integers, in which arithmetic on a parameter would be another
one: they lie in a buffer of the layer, and the parameter is a `PackedWeight` without memory.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import Parameter, functional

from compiled_attn.hf.layers import restore
from compiled_attn.hf.packed_weight import PackedWeight, WriteTrap
from compiled_attn.ops import load, packed_linear
from compiled_attn.ops.packed_linear import Packing

__all__ = [
    "PackedEmbedding",
    "PackedLinear",
    "halved_weights",
    "pack_linears",
    "packable",
    "packed_weights",
    "plain_layers",
    "quantised_weights",
]


class _Packed(nn.Module):
    """A layer of a packed ``weight``, which `state_dict` gives and takes as a plain one.

    Attributes:
        packed: the integers of a `PackedWeight`; None for any other.
        scale: ``[N]`` of a weight of int8; None for any other.
        single: of a weight of halves nothing, in the dtype that it stands for; None for any other.
    """

    weight: Tensor
    packed: Tensor | None
    scale: Tensor | None
    single: Tensor | None

    def _keep(self, weight: Tensor, packed: Tensor | None, scale: Tensor | None) -> None:
        self.weight = weight
        self.register_buffer("packed", packed, persistent=False)
        self.register_buffer("scale", scale, persistent=False)
        is_halves = packed is not None and packed.dtype is torch.int16
        single = torch.empty(0, dtype=torch.float32) if is_halves else None
        self.register_buffer("single", single, persistent=False)  # is cast with the model

    @property
    def _stored(self) -> Tensor:
        """The weight in the order of the op."""
        return self.weight if self.packed is None else self.packed

    def _is_cast(self) -> bool:
        """Whether the op does not take the weight any more."""
        if self.single is not None:
            return self.single.dtype is not torch.float32
        return not packed_linear.is_packed(self._stored)

    def _plain_weight(self) -> Tensor:
        weight = packed_linear.unpack(self._stored.detach())
        if self.single is not None:
            return weight.to(self.single.dtype)
        return weight if self.scale is None else (weight * self.scale[:, None]).bfloat16()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self._plain_weight()

    def _load_from_state_dict(self, state: Any, prefix: str, *others: Any) -> None:
        name = f"{prefix}weight"
        plain = state.get(name)
        panels, groups, *tile = self._stored.shape
        if plain is None or plain.shape != (panels * tile[0], groups * tile[1]):
            super()._load_from_state_dict(state, prefix, *others)  # says what does not fit
        elif self.packed is None:
            packed = packed_linear.arranged(plain.to(self.weight), self.weight.shape[-1])
            super()._load_from_state_dict({**state, name: packed}, prefix, *others)
        else:
            *_, missing, _, errors = others
            self._take(name, plain, self.packed, errors)
            rest = {key: value for key, value in state.items() if key != name}
            super()._load_from_state_dict(rest, prefix, *others)
            if name in missing:
                missing.remove(name)

    def _take(self, name: str, plain: Tensor, packed: Tensor, errors: list[str]) -> None:
        """Packs a plain weight as this one is; adds an error where it cannot be."""
        if self.scale is not None:
            codes, scale = packed_linear.quantise(plain)
            packed.copy_(codes)
            self.scale.copy_(scale)
            return
        single = plain.to(packed.device, torch.float32)
        if packed_linear.has_halves(single):
            packed.copy_(packed_linear.halve(single))
            return
        errors.append(
            f"expected for {name} weights that bfloat16 holds exactly, as those that an engine has "
            "packed into 16 bits, got others: load the model again, and take weights 'packed'"
        )


class PackedLinear(_Packed):
    """A linear layer through the op ``packed_linear``.

    Args:
        linear: the layer that it takes the place of; its weight is packed already.
        packed: the integers of its weight, if they lie elsewhere.
        scale: ``[out_features]``, if they are int8.

    Shape:
        - forward(``[..., in_features]``) -> ``[..., out_features]``
    """

    def __init__(
        self, linear: nn.Linear, packed: Tensor | None = None, scale: Tensor | None = None
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._keep(linear.weight, packed, scale)
        self.bias = linear.bias
        load()

    def forward(self, input: Tensor) -> Tensor:
        """The layer's output."""
        # The op has no backward; and a weight may have been cast since, to compare.
        if self._is_cast() or not self._takes(input.dtype) or self._wants_gradients(input):
            return self.plain(input)
        rows = input.reshape(-1, self.in_features).contiguous()
        out = torch.ops.compiled_attn.packed_linear(rows, self._stored, self.bias, self.scale)
        shaped: Tensor = out.view(*input.shape[:-1], self.out_features)
        return shaped

    def _takes(self, dtype: torch.dtype) -> bool:
        if self.single is not None:
            return dtype is torch.float32
        return self.scale is None or dtype is torch.bfloat16

    def _wants_gradients(self, input: Tensor) -> bool:
        own = input, self._stored, self.bias
        return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in own)

    def plain(self, input: Tensor) -> Tensor:
        """The output of a plain layer of the same weight, which is unpacked for this call."""
        weight = packed_linear.unpack(self._stored)
        if self.single is not None:
            weight = weight.to(self.single.dtype)
        if self.scale is None:
            return functional.linear(input, weight, self.bias)
        sums = functional.linear(input, weight.to(input.dtype)) * self.scale
        return (sums if self.bias is None else sums + self.bias).to(input.dtype)

    def extra_repr(self) -> str:
        """Sizes, as `torch.nn.Linear` has them."""
        return f"in_features={self.in_features}, out_features={self.out_features}"


class PackedEmbedding(_Packed):
    """An embedding whose weight is that of a packed head.

    Args:
        embedding: the layer that it takes the place of; its weight is packed already.
        packed: the integers of its weight, if they lie elsewhere.
        scale: ``[num_embeddings]``, if they are int8.

    Shape:
        - forward(ids ``[...]``) -> ``[..., embedding_dim]``
    """

    def __init__(
        self, embedding: nn.Embedding, packed: Tensor | None = None, scale: Tensor | None = None
    ) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = embedding.num_embeddings, embedding.embedding_dim
        self._keep(embedding.weight, packed, scale)
        load()

    def forward(self, ids: Tensor) -> Tensor:
        """The rows of the ids."""
        rows = self._rows(ids)
        if self.single is not None:
            return rows.to(self.single.dtype)
        return rows if self.scale is None else (rows * self.scale[ids][..., None]).bfloat16()

    def _rows(self, ids: Tensor) -> Tensor:
        weight = self._stored
        wants_gradients = torch.is_grad_enabled() and weight.requires_grad
        if wants_gradients or not packed_linear.is_packed(weight):
            return packed_linear.rows(weight, ids)
        # An op, as inductor would look up each element anew for all that reads it.
        flat = ids.reshape(-1).long().contiguous()
        return torch.ops.compiled_attn.packed_rows(weight, flat).view(*ids.shape, -1)  # type: ignore[no-any-return]


def pack_linears(
    model: nn.Module,
    undo: contextlib.ExitStack,
    packing: Callable[[Tensor], Packing | None] = packed_linear.as_packed,
) -> None:
    """Packs the weights of a model's linear layers, one after the other.

    Left alone are weights that the op does not take, that something else than linear layers and
    embeddings of torch's own classes has (adapters, quantised layers, scaled embeddings), and
    layers with hooks.

    Args:
        model: is changed; where gradients are wanted, its layers compute as plain ones.
        undo: gets what makes the model what it was: the weights themselves, where they become int8.
        packing: how a weight ``[N, K]`` is to be packed, of those that can be; None: not at all.
            int8 has a scale for each output, and is for bfloat16 alone. Weights of int8 and of
            halves become `PackedWeight`, which have no gradients.
    """
    homes, owners = _homes(model), _owners(model)
    traps = {dtype: WriteTrap(dtype) for dtype in (torch.float32, torch.bfloat16)}
    for parameter in packable(model):
        chosen = packing(parameter)
        if chosen is None:
            continue
        places = owners[parameter.data_ptr()]
        stored = _PACK[chosen](parameter, traps[parameter.dtype], undo)
        for _, module in places:
            _replace(module, stored, homes[id(module)], undo)


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


def quantised_weights(model: nn.Module) -> int:
    """How many of them are int8."""
    layers = (m for m in model.modules() if isinstance(m, PackedLinear) and m.scale is not None)
    return len({id(layer.weight) for layer in layers})


def halved_weights(model: nn.Module) -> int:
    """How many of them are the upper halves of float32."""
    layers = (m for m in model.modules() if isinstance(m, PackedLinear) and m.single is not None)
    return len({id(layer.weight) for layer in layers})


def packable(model: nn.Module) -> list[Parameter]:
    """The weights of a model that `pack_linears` can pack."""
    return [
        owners[0][0]
        for owners in _owners(model).values()
        if len({id(parameter) for parameter, _ in owners}) == 1  # or else one would stay behind
        and type(owners[0][0]) is Parameter
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


_Stored: TypeAlias = "tuple[Tensor | None, Tensor | None]"
"""The integers of a weight and their scale; None: it has none."""


def _pack(parameter: Parameter, _: WriteTrap, undo: contextlib.ExitStack) -> _Stored:
    undo.callback(_unpack, parameter)
    parameter.data = packed_linear.pack(parameter.detach())
    return None, None


def _halve(parameter: Parameter, trap: WriteTrap, undo: contextlib.ExitStack) -> _Stored:
    halves = packed_linear.halve(parameter.detach())
    _hide(parameter, trap, lambda: packed_linear.unpack(halves), undo)
    return halves, None


def _quantise(parameter: Parameter, trap: WriteTrap, undo: contextlib.ExitStack) -> _Stored:
    plain = parameter.detach()
    codes, scale = packed_linear.quantise(plain)
    _hide(parameter, trap, lambda: plain, undo)
    return codes, scale


def _hide(
    parameter: Parameter,
    trap: WriteTrap,
    plain: Callable[[], Tensor],
    undo: contextlib.ExitStack,
) -> None:
    undo.callback(parameter.requires_grad_, parameter.requires_grad)
    undo.callback(lambda: PackedWeight.reveal(parameter, plain()))
    parameter.requires_grad_(False)
    PackedWeight.hide(parameter, trap)


_PACK: dict[Packing, Callable[[Parameter, WriteTrap, contextlib.ExitStack], _Stored]] = {
    "packed": _pack,
    "halves": _halve,
    "int8": _quantise,
}


def _replace(
    module: nn.Module,
    stored: _Stored,
    places: list[tuple[dict[str, Any], str]],
    undo: contextlib.ExitStack,
) -> None:
    kind: Any = PackedLinear if isinstance(module, nn.Linear) else PackedEmbedding
    packed: nn.Module = kind(module, *stored)
    packed.train(module.training)
    for children, name in places:
        undo.callback(children.__setitem__, name, module)
        children[name] = packed


def _unpack(parameter: Parameter) -> None:
    if parameter.dim() == 2:
        return  # it was never packed: an interrupt came first
    parameter.data = packed_linear.unpack(parameter.detach())
