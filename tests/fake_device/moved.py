"""Runs a function with its tensors on a device, and copies back what it wrote."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tests.fake_device import NAME, counts, open_device

__all__ = ["Memory", "on_device"]


def on_device(
    function: Callable[..., Any], device: str = NAME, *, waits: bool = True
) -> Callable[..., Any]:
    """Wraps a function: its tensors are moved to a device, its results to the host.

    Args:
        function: takes tensors, also in tuples and dataclasses.
        device: the fake device, or an existing one.
        waits: whether it may synchronize with the device; only the fake device can tell.
    """

    def call(*args: Any, **options: Any) -> Any:
        is_counted = device == NAME
        memory = Memory(open_device() if is_counted else torch.device(device))
        args, options = memory.moved((args, options))
        before = counts() if is_counted else None
        result = function(*args, **options)
        if before is not None:
            spent = counts().since(before)
            assert waits or not any(spent[:3]), spent
        memory.bring_back()
        return pytree.tree_map_only(Tensor, Tensor.cpu, result)

    return call


class Memory:
    """Copies tensors to a device; those that share memory share it there too, strides included."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._bytes: dict[int, tuple[Tensor, Tensor]] = {}

    def moved(self, values: Any) -> Any:
        return pytree.tree_map(self._one, values)

    def bring_back(self) -> None:
        for host, there in self._bytes.values():
            host.copy_(there)

    def _one(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
            return dataclasses.replace(value, **{n: self._one(v) for n, v in fields.items()})
        return value

    def _tensor(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if not storage.nbytes():
            return tensor.to(self._device)
        if storage.data_ptr() not in self._bytes:
            host = torch.empty(0, dtype=torch.uint8).set_(storage)
            self._bytes[storage.data_ptr()] = host, host.to(self._device)
        there = self._bytes[storage.data_ptr()][1].untyped_storage()
        empty = torch.empty(0, dtype=tensor.dtype, device=self._device)
        return empty.set_(there, tensor.storage_offset(), tensor.shape, tensor.stride())
