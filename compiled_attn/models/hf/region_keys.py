"""Keys of decoder layers: equal if the compiled code of one layer is valid for another.

Dynamo does not guard layers that reuse a trace, so a key covers everything that a trace can read
from a layer, except the values of its parameters and buffers.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from compiled_attn.attention.metadata import UnifiedMetadata
from compiled_attn.cache.kv_cache import PagedKVCache

__all__ = ["region_keys", "relate_sizes", "without_numbers"]

_CONSTANTS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_OWN = ("_parameters", "_buffers", "_modules")
_NUMBER = "layer_idx"


def region_keys(
    layers: Sequence[nn.Module],
    numbers: Sequence[tuple[int, ...]],
    cache: PagedKVCache,
    *,
    reads_numbers: bool,
) -> tuple[int | None, ...]:
    """Returns a key for each layer; None for one that shares code with no other.

    Args:
        layers: the decoder layers.
        numbers: layers of the cache of each.
        cache: the cache that they write to.
        reads_numbers: whether a forward may read the ``layer_idx`` of a module.
    """
    left_out = {*_OWN} if reads_numbers else {*_OWN, _NUMBER}
    known: dict[Any, int] = {}
    signatures = [
        (_signature(layer, left_out), *(_slots(cache, number) for number in own))
        if len(own) < 2
        else None
        for layer, own in zip(layers, numbers, strict=True)
    ]
    return tuple(
        None if signature is None else known.setdefault(signature, len(known))
        for signature in signatures
    )


def relate_sizes(metadata: UnifiedMetadata) -> None:
    """Asserts which sizes are equal: a region whose trace discovers it cannot be reused."""
    if metadata.by_request is not None:
        tables, lengths, starts = metadata.by_request
        torch._check(tables.shape[0] == lengths.shape[0])
        torch._check(starts.shape[0] == lengths.shape[0] + 1)


def _slots(cache: PagedKVCache, number: int) -> Any:
    value = cache.value(number) if cache.stores_value(number) else None
    tensors = (cache.key(number), value, cache.key_scale(number), cache.value_scale(number))
    return tuple(None if each is None else _layout(each) for each in tensors)


@contextlib.contextmanager
def without_numbers(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Context without ``layer_idx`` in the modules of the layers: a forward that uses it fails.

    It may pass it on, as it does to the methods of a cache.
    """
    owners = [vars(module) for layer in layers for module in layer.modules()]
    numbers = [(own, own[_NUMBER]) for own in owners if _NUMBER in own]
    try:
        for own, _ in numbers:
            own[_NUMBER] = _Unusable()
        yield
    finally:
        for own, number in numbers:
            own[_NUMBER] = number


class _Unusable:
    """Fails where a number would be compared, looked up or printed, as it does in arithmetic."""

    def _fail(self, *_: object) -> Any:
        raise TypeError("a layer's number was used")

    __bool__ = __eq__ = __ne__ = __hash__ = __str__ = __repr__ = __format__ = _fail


def _signature(layer: nn.Module, left_out: Collection[str]) -> Any:
    first: dict[int, int] = {}  # numbers tensors, so that shared ones are recognised
    modules = []
    for path, module in layer.named_modules(remove_duplicate=False):
        tensors = [
            (
                kind,
                name,
                tensor is None
                or (
                    first.setdefault(id(tensor), len(first)),
                    _layout(tensor),
                    _description(vars(tensor)),
                ),
            )
            for kind in ("_parameters", "_buffers")
            for name, tensor in getattr(module, kind).items()
        ]
        attributes = [
            (name, _description(value))
            for name, value in vars(module).items()
            if name not in left_out and not (module is layer and name == "forward")
        ]
        modules.append((path, type(module), tuple(tensors), tuple(attributes)))
    return tuple(modules)


def _layout(tensor: Tensor) -> Any:
    return (
        type(tensor),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
        tensor.device,
        tensor.requires_grad,
    )


def _description(value: Any) -> Any:
    """Describes constants by value, containers by their items, anything else by identity."""
    if isinstance(value, _CONSTANTS):
        return type(value), repr(value)
    if isinstance(value, dict):
        return type(value), tuple((_description(k), _description(v)) for k, v in value.items())
    if isinstance(value, list | tuple):
        return type(value), tuple(map(_description, value))
    if type(value) is functools.partial:
        return _description((type(value), value.func, value.args, value.keywords))
    if isinstance(value, set | frozenset):
        return type(value), frozenset(map(_description, value))
    return type(value), id(value)
