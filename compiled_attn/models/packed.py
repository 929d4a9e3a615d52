"""Replaces linear layers of a model by layers with packed weights.

The parameters stay those of the model, in another memory order, so nothing is stored twice;
``state_dict`` returns and accepts plain weights. Weights of 4 and 8 bits are rounded; the upper
halves of float32 weights whose lower halves are zeros are exact. All are integers, on which
arithmetic with a parameter would be wrong: they are stored in a buffer of the layer, and the
parameter has no memory: see `WriteTrap`.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter

from compiled_attn.models.packed_layers import PackedEmbedding, PackedLayer, PackedLinear
from compiled_attn.models.packed_weight import WriteTrap
from compiled_attn.models.quantised_layers import (
    QuantisedEmbedding,
    QuantisedLayer,
    QuantisedLinear,
)
from compiled_attn.ops import packed_linear
from compiled_attn.ops.choose import serves_quantised
from compiled_attn.ops.packed_linear import BITS_OF, EXACT_INPUTS, Packing
from compiled_attn.ops.quantised_linear import quantise

__all__ = [
    "PackedEmbedding",
    "PackedLinear",
    "dequantise_layers",
    "exact_inputs",
    "hidden_weights",
    "pack_linears",
    "packable",
    "packed_weights",
    "plain_layers",
    "quantised_formats",
    "quantised_weights",
    "weight_bytes",
    "widened_weights",
]


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
        undo: receives the callbacks that restore the model. They hold the original weights of
            quantised layers.
        packing: chooses the packing of each weight ``[N, K]`` that can be packed; None skips it.
            Quantised weights and halves have no gradients.
    """
    parents, owners, trap = _parents(model), _owners(model), WriteTrap()
    for parameter in packable(model):
        chosen = packing(parameter)
        if chosen is None:
            continue
        modules = [module for _, module in owners[parameter.data_ptr()]]
        stored = _store(parameter, chosen, trap, undo)
        kinds: Any = (PackedLinear, PackedEmbedding)
        if chosen in BITS_OF:
            kinds = QuantisedLinear, QuantisedEmbedding
        for module in modules:
            kind = kinds[not isinstance(module, nn.Linear)]
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
        module.forward = module.plain  # type: ignore[method-assign]
    try:
        yield
    finally:
        for module, forward in zip(layers, before, strict=True):
            del module.forward
            if forward is not None:
                module.forward = forward  # type: ignore[method-assign]


def dequantise_layers(model: nn.Module) -> None:
    """Replaces quantised layers by plain ones, for what computes with weights itself."""
    plain: dict[int, Parameter] = {}
    for children, name in [each for of in _parents(model).values() for each in of]:
        child = children[name]
        if not isinstance(child, QuantisedLayer):
            continue
        key = id(child.weight)
        if key not in plain:
            plain[key] = Parameter(child.plain_weight(), False)
        weight = plain[key]
        outputs, inputs = weight.shape
        layer: Any = nn.Embedding(outputs, inputs, device="meta")
        if isinstance(child, QuantisedLinear):
            layer = nn.Linear(inputs, outputs, bias=False, device="meta")
            layer.bias = child.bias
        layer.weight = weight
        children[name] = layer.train(child.training)


def packed_weights(model: nn.Module) -> int:
    """Number of packed weights in a model."""
    return _count(model, lambda _: True)


def quantised_weights(model: nn.Module) -> int:
    """Number of weights of 4 to 8 bits in a model."""
    return _count(model, lambda layer: isinstance(layer, QuantisedLayer))


def quantised_formats(model: nn.Module) -> set[str]:
    """Formats of the quantised weights of a model: those of `BITS_OF`, or of a file."""
    return {each.format for each in model.modules() if isinstance(each, QuantisedLayer)}


@contextlib.contextmanager
def exact_inputs(model: nn.Module) -> Iterator[None]:
    """Leaves inputs of quantised layers unrounded in a context.

    A difference of one bit may round an input to the next int8, which hides small mistakes.
    """
    rounding = [each for each in model.modules() if isinstance(each, QuantisedLayer)]
    before = [each.int8_inputs for each in rounding]
    try:
        for each in rounding:
            each.int8_inputs = False
        yield
    finally:
        for each, was in zip(rounding, before, strict=True):
            each.int8_inputs = was


def widened_weights(model: nn.Module) -> int:
    """Number of weights in a model that are the upper halves of float32."""
    return _count(model, lambda layer: layer.single is not None)


def _count(model: nn.Module, counts: Callable[[PackedLinear], bool]) -> int:
    layers = (module for module in model.modules() if isinstance(module, PackedLinear))
    return len({id(layer.weight) for layer in layers if counts(layer)})


def weight_bytes(model: nn.Module, bits: int | None = None) -> int:
    """Bytes that the weights of a model take as they are stored.

    Args:
        bits: of the weights that `pack_linears` will round; None: it will round none.
    """
    # A hidden parameter has the memory of one number.
    own = {
        id(each): min(each.nbytes, each.untyped_storage().nbytes()) for each in model.parameters()
    }
    if bits is not None:
        own |= {id(each): each.numel() * bits // 8 for each in packable(model)}
    layers = (each for each in model.modules() if isinstance(each, QuantisedLayer))
    packed = {each.packed.data_ptr(): each.quantised.nbytes for each in layers}
    return sum(own.values()) + sum(packed.values())


def hidden_weights(model: nn.Module) -> dict[WriteTrap, list[Tensor]]:
    """Returns the parameters of a model whose values are packed elsewhere, by their trap."""
    hidden: dict[WriteTrap, dict[int, Tensor]] = {}
    for module in model.modules():
        if isinstance(module, PackedLayer) and module.trap is not None:
            hidden.setdefault(module.trap, {})[id(module.weight)] = module.weight
    return {trap: [*weights.values()] for trap, weights in hidden.items()}


def packable(model: nn.Module) -> list[Parameter]:
    """Returns the weights of a model that `pack_linears` can pack."""
    return [
        owners[0][0]
        for owners in _owners(model).values()
        if len({id(parameter) for parameter, _ in owners}) == 1  # else one stays unpacked
        and type(owners[0][0]) is Parameter
        and packed_linear.can_round(owners[0][0])
        and serves_quantised(owners[0][0].device.type, owners[0][0].dtype)
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
) -> tuple[Any, ...]:
    """Packs a weight; returns its integers and what hides the parameter, or nothing."""
    plain = parameter.detach()
    if packing == "packed":
        undo.callback(_unpack, parameter)
        parameter.data = packed_linear.pack(plain)
        return ()
    packed: Any
    if packing in BITS_OF:
        packed = quantise(plain, BITS_OF[packing])
        undo.callback(setattr, parameter, "data", plain)
    else:
        packed = packed_linear.pack_bf16(plain)
        undo.callback(lambda: setattr(parameter, "data", packed_linear.unpack(packed)))
    undo.callback(parameter.requires_grad_, parameter.requires_grad)
    parameter.requires_grad_(False)
    trap.hide(parameter)
    if packing in BITS_OF:
        return packed, trap, packing, packing not in EXACT_INPUTS
    return packed, trap


def _unpack(parameter: Parameter) -> None:
    if parameter.dim() == 2:
        return  # an exception came before it was packed
    parameter.data = packed_linear.unpack(parameter.detach())
