"""Replaces linear layers of a model by layers with packed weights.

The parameters stay those of the model, in another memory order, so nothing is stored twice;
``state_dict`` returns and accepts plain weights. int8 weights take half of the memory and are
rounded; so do the upper halves of float32 weights whose lower halves are zeros, which are exact.
Both are integers, on which arithmetic with a parameter would be wrong: they are stored in a buffer
of the layer, and the parameter has no memory: see `WriteTrap`.
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

from compiled_attn.errors import ModelChanged
from compiled_attn.models.packed_weight import WriteTrap
from compiled_attn.ops import load, packed_linear
from compiled_attn.ops.packed_linear import Packing

__all__ = [
    "PackedEmbedding",
    "PackedLinear",
    "hidden_weights",
    "pack_linears",
    "packable",
    "packed_weights",
    "plain_layers",
    "quantised_weights",
    "widened_weights",
]


class _Packed(nn.Module):
    """A layer with a packed ``weight``, which `state_dict` returns and accepts as a plain one.

    Args:
        weight: ``[N, K]`` in the memory order of the op, or hidden by ``trap``.
        packed: the integers of a weight that the parameter does not store, else None.
        scale: ``[N]`` of an int8 weight, else None.
        trap: hides the parameter of packed integers, else None.

    Attributes:
        single: for a weight in halves an empty tensor of the dtype it represents, else None.
    """

    packed: Tensor | None
    scale: Tensor | None
    single: Tensor | None

    def __init__(
        self,
        weight: Tensor,
        packed: Tensor | None = None,
        scale: Tensor | None = None,
        trap: WriteTrap | None = None,
    ) -> None:
        super().__init__()
        self.weight, self.trap = weight, trap
        self.register_buffer("packed", packed, persistent=False)
        self.register_buffer("scale", scale, persistent=False)
        is_halves = packed is not None and packed.dtype is torch.int16
        single = torch.empty(0, dtype=torch.float32) if is_halves else None
        self.register_buffer("single", single, persistent=False)  # cast together with the model
        load()

    @property
    def _stored(self) -> Tensor:
        """The weight in the memory order of the op."""
        return self.weight if self.packed is None else self.packed

    def _is_cast(self) -> bool:
        if self.single is not None:
            return self.single.dtype is not torch.float32
        return not packed_linear.is_packed(self._stored)

    def _plain_weight(self) -> Tensor:
        weight = packed_linear.unpack(self._stored.detach())
        if self.single is not None:
            return weight.to(self.single.dtype)
        return weight if self.scale is None else (weight * self.scale[:, None]).bfloat16()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> _Packed:
        is_hidden = self.trap is not None and self.trap.is_hidden(self.weight)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.trap is not None and is_hidden:
            self.trap.hide(self.weight)  # again, as a cast allocates memory
        return self

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if self.trap is not None and self.weight.isnan().all():
            self.trap.hide(self.weight)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = self._plain_weight()

    def _load_from_state_dict(self, state: Any, prefix: str, *others: Any) -> None:
        name = f"{prefix}weight"
        plain = state.get(name)
        panels, groups, *tile = self._stored.shape
        if plain is None or plain.shape != (panels * tile[0], groups * tile[1]):
            super()._load_from_state_dict(state, prefix, *others)  # reports what does not fit
        elif self.packed is None:
            packed = packed_linear.arrange(plain.to(self.weight), self.weight.shape[-1])
            super()._load_from_state_dict({**state, name: packed}, prefix, *others)
        else:
            *_, missing, _, errors = others
            self._pack_into(name, plain, self.packed, errors)
            rest = {key: value for key, value in state.items() if key != name}
            super()._load_from_state_dict(rest, prefix, *others)
            if name in missing:
                missing.remove(name)

    def _pack_into(self, name: str, plain: Tensor, packed: Tensor, errors: list[str]) -> None:
        """Packs a plain weight into ``packed``; appends an error if that is impossible."""
        if self.scale is not None:
            integers, scale = packed_linear.quantise(plain)
            packed.copy_(integers)
            self.scale.copy_(scale)
            return
        single = plain.to(packed.device, torch.float32)
        if packed_linear.fits_bf16(single):
            packed.copy_(packed_linear.pack_bf16(single))
            return
        errors.append(
            f"expected for {name} weights that bfloat16 holds exactly, like those that an engine "
            "packed into 16 bits, got others: load the model again, and use weights 'packed'"
        )


class PackedLinear(_Packed):
    """A linear layer that calls the op ``packed_linear``; replaces ``linear``, which is packed.

    ``stored``: the weight's integers, scale and trap if the parameter does not store them.
    """

    def __init__(self, linear: nn.Linear, *stored: Any) -> None:
        super().__init__(linear.weight, *stored)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias

    def forward(self, input: Tensor) -> Tensor:
        """Computes the layer's output."""
        # The op has no backward, and a check may have cast the weight.
        if self._is_cast() or not self._supports(input.dtype) or self._needs_gradients(input):
            return self.plain(input)
        rows = input.reshape(-1, self.in_features).contiguous()
        out = torch.ops.compiled_attn.packed_linear(rows, self._stored, self.bias, self.scale)
        shaped: Tensor = out.view(*input.shape[:-1], self.out_features)
        return shaped

    def _supports(self, dtype: torch.dtype) -> bool:
        if self.single is not None:
            return dtype is torch.float32
        return self.scale is None or dtype is torch.bfloat16

    def _needs_gradients(self, input: Tensor) -> bool:
        if self.packed is not None and self.weight.requires_grad:
            raise ModelChanged(
                f"expected packed weights {[*self.weight.shape]} to need no gradients, "
                "got requires_grad: load the model again, and use weights 'packed' or 'plain'"
            )
        own = input, self._stored, self.bias
        return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in own)

    def plain(self, input: Tensor) -> Tensor:
        """Computes the output like a plain layer, with the weight unpacked for this call."""
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
    """An embedding that shares its weight with a packed head; see `PackedLinear`."""

    def __init__(self, embedding: nn.Embedding, *stored: Any) -> None:
        super().__init__(embedding.weight, *stored)
        self.num_embeddings, self.embedding_dim = embedding.num_embeddings, embedding.embedding_dim

    def forward(self, ids: Tensor) -> Tensor:
        """Looks up the rows of ids."""
        rows = self._rows(ids)
        if self.single is not None:
            return rows.to(self.single.dtype)
        return rows if self.scale is None else (rows * self.scale[ids][..., None]).bfloat16()

    def _rows(self, ids: Tensor) -> Tensor:
        weight = self._stored
        needs_gradients = torch.is_grad_enabled() and weight.requires_grad
        if needs_gradients or not packed_linear.is_packed(weight):
            return packed_linear.rows(weight, ids)
        # An op, as inductor would repeat the lookup of each element for every reader.
        flat = ids.reshape(-1).long().contiguous()
        return torch.ops.compiled_attn.packed_rows(weight, flat).view(*ids.shape, -1)  # type: ignore[no-any-return]


def pack_linears(
    model: nn.Module,
    undo: contextlib.ExitStack,
    packing: Callable[[Tensor], Packing | None] = packed_linear.as_packed,
) -> None:
    """Packs the weights of a model's linear layers, one after the other.

    Skips weights that the op does not support, weights of modules other than torch's own linear
    layers and embeddings (adapters, quantised layers, scaled embeddings), and layers with hooks.

    Args:
        model: changed in place; layers that need gradients compute like plain ones.
        undo: receives the callbacks that restore the model. They hold the original weights of int8
            layers.
        packing: chooses the packing of each weight ``[N, K]`` that can be packed; None skips it.
            int8 has a scale per output and is for bfloat16 only. int8 weights and halves have no
            gradients.
    """
    parents, owners, trap = _parents(model), _owners(model), WriteTrap()
    for parameter in packable(model):
        chosen = packing(parameter)
        if chosen is None:
            continue
        modules = [module for _, module in owners[parameter.data_ptr()]]
        stored = _store(parameter, chosen, trap, undo)
        for module in modules:
            kind: Any = PackedLinear if isinstance(module, nn.Linear) else PackedEmbedding
            layer: nn.Module = kind(module, *stored).train(module.training)
            for children, name in parents[id(module)]:
                undo.callback(children.__setitem__, name, module)
                children[name] = layer


@contextlib.contextmanager
def plain_layers(model: nn.Module) -> Iterator[None]:
    """Context in which packed layers compute like plain ones, unpacking one weight at a time."""
    layers = [module for module in model.modules() if isinstance(module, PackedLinear)]
    before = [module.__dict__.get("forward") for module in layers]
    for module in layers:
        module.forward = MethodType(PackedLinear.plain, module)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for module, forward in zip(layers, before, strict=True):
            del module.forward
            if forward is not None:
                module.forward = forward  # type: ignore[method-assign]


def packed_weights(model: nn.Module) -> int:
    """Number of packed weights in a model."""
    return _count(model, lambda _: True)


def quantised_weights(model: nn.Module) -> int:
    """Number of int8 weights in a model."""
    return _count(model, lambda layer: layer.scale is not None)


def widened_weights(model: nn.Module) -> int:
    """Number of weights in a model that are the upper halves of float32."""
    return _count(model, lambda layer: layer.single is not None)


def _count(model: nn.Module, counts: Callable[[PackedLinear], bool]) -> int:
    layers = (module for module in model.modules() if isinstance(module, PackedLinear))
    return len({id(layer.weight) for layer in layers if counts(layer)})


def hidden_weights(model: nn.Module) -> dict[WriteTrap, list[Tensor]]:
    """Returns the parameters of a model whose values are packed elsewhere, by their trap."""
    hidden: dict[WriteTrap, dict[int, Tensor]] = {}
    for module in model.modules():
        if isinstance(module, _Packed) and module.trap is not None:
            hidden.setdefault(module.trap, {})[id(module.weight)] = module.weight
    return {trap: [*weights.values()] for trap, weights in hidden.items()}


def packable(model: nn.Module) -> list[Parameter]:
    """Returns the weights of a model that `pack_linears` can pack."""
    return [
        owners[0][0]
        for owners in _owners(model).values()
        if len({id(parameter) for parameter, _ in owners}) == 1  # else one stays unpacked
        and type(owners[0][0]) is Parameter
        and packed_linear.can_pack(owners[0][0])
        and any(type(module) is nn.Linear for _, module in owners)
        and all(_is_plain(module) for _, module in owners)
    ]


def _owners(model: nn.Module) -> dict[int, list[tuple[Parameter, nn.Module]]]:
    owners = defaultdict(list)
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners[parameter.data_ptr()].append((parameter, module))
    return owners


def _parents(model: nn.Module) -> dict[int, list[tuple[dict[str, Any], str]]]:
    parents = defaultdict(list)
    for parent in model.modules():
        for name, child in parent._modules.items():
            parents[id(child)].append((parent._modules, name))
    return parents


def _is_plain(module: nn.Module) -> bool:
    if module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__:
        return False
    is_embedding = type(module) is nn.Embedding and module.max_norm is None
    return is_embedding or type(module) is nn.Linear


def _store(
    parameter: Parameter, packing: Packing, trap: WriteTrap, undo: contextlib.ExitStack
) -> tuple[Tensor | None, Tensor | None, WriteTrap | None]:
    """Packs a weight; returns its integers, their scale and what hides the parameter, or None."""
    plain = parameter.detach()
    if packing == "packed":
        undo.callback(_unpack, parameter)
        parameter.data = packed_linear.pack(plain)
        return None, None, None
    packed: Tensor
    scale: Tensor | None = None
    if packing == "int8":
        packed, scale = packed_linear.quantise(plain)
        undo.callback(setattr, parameter, "data", plain)
    else:
        packed = packed_linear.pack_bf16(plain)
        undo.callback(lambda: setattr(parameter, "data", packed_linear.unpack(packed)))
    undo.callback(parameter.requires_grad_, parameter.requires_grad)
    parameter.requires_grad_(False)
    trap.hide(parameter)
    return packed, scale, trap


def _unpack(parameter: Parameter) -> None:
    if parameter.dim() == 2:
        return  # an exception came before it was packed
    parameter.data = packed_linear.unpack(parameter.detach())
