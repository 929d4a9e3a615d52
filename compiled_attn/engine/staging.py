"""Transfers of a step: all of its tensors to the device in one copy, its tokens back."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Generic, TypeAlias, TypeVar, overload

import torch
from torch import Tensor

__all__ = ["Later", "Return", "Staging", "staged_bytes"]

Item = TypeVar("Item")

Fields: TypeAlias = Sequence[Tensor | None]

_ALIGNMENT = 64


class Staging:
    """Two host buffers, pinned where the device supports it, and one device buffer.

    The tensors of a step are views of the device buffer. Steps of the same shapes get the same
    tensors at the same addresses: static inputs of a recorded graph. The host fills its buffers in
    turn, as the device may still be reading the last one.

    Args:
        size: bytes of the largest step, see `staged_bytes`.
    """

    def __init__(self, device: torch.device, size: int) -> None:
        self._hosts = [torch.zeros(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._copied = [torch.Event(device) for _ in range(2)]
        self._has_event = [True, True]  # False: an exception came between a copy and its event
        self._buffer = torch.zeros(size, dtype=torch.uint8, device=device)
        self._views: dict[tuple[object, ...], list[list[Tensor]]] = {}
        self._turn = 0

    def stage(self, fields: Fields) -> list[Tensor | None]:
        """Copies the tensors of a step to the device, asynchronously; returns them there.

        They are valid, in stream order, until the next step is staged.
        """
        given = [field for field in fields if field is not None]
        end = staged_bytes(given)
        if end > len(self._buffer):
            raise ValueError(
                f"expected a step of at most {len(self._buffer):,} bytes, got {end:,}: make the "
                "staging for the largest bucket"
            )
        key = tuple((field.dtype, field.shape) for field in given)
        if key not in self._views:
            self._views[key] = [_views(each, given) for each in (*self._hosts, self._buffer)]
        *hosts, staged = self._views[key]
        self._turn = turn = 1 - self._turn
        copied = self._copied[turn]
        if not self._has_event[turn]:
            torch.accelerator.synchronize(self._buffer.device)
        elif not copied.query():  # a step was rolled back
            copied.synchronize()
        self._has_event[turn] = False
        for host, field in zip(hosts[turn], given, strict=True):
            host.copy_(field)
        self._buffer[:end].copy_(self._hosts[turn][:end], non_blocking=True)
        copied.record(torch.accelerator.current_stream(self._buffer.device))
        self._has_event[turn] = True
        there = iter(staged)
        return [None if field is None else next(there) for field in fields]


class Later(Sequence[Item], Generic[Item]):
    """Items whose first read waits for them."""

    def __init__(self, read: Callable[[], list[Item]]) -> None:
        self._read = read

    @cached_property
    def _items(self) -> list[Item]:
        return self._read()

    @overload
    def __getitem__(self, at: int) -> Item: ...
    @overload
    def __getitem__(self, at: slice) -> list[Item]: ...
    def __getitem__(self, at: int | slice) -> Item | list[Item]:
        return self._items[at]

    def __len__(self) -> int:
        return len(self._items)


class Return:
    """Copies the integers of a step to the host; only their reader waits.

    Those of a step must be read before those of the second next one are sent.
    """

    def __init__(self, device: torch.device, size: int) -> None:
        self._turns = [
            (torch.zeros(size, dtype=torch.int64, pin_memory=True), torch.Event(device))
            for _ in range(2)
        ]

    def send(self, ints: Tensor) -> Later[int]:
        """Starts the copy of ``[n]`` int64."""
        buffer, arrived = self._turns[0]
        self._turns.reverse()
        buffer[: len(ints)].copy_(ints, non_blocking=True)
        arrived.record(torch.accelerator.current_stream(ints.device))
        return Later(partial(_received, buffer[: len(ints)], arrived))


def _received(buffer: Tensor, arrived: torch.Event) -> list[int]:
    arrived.synchronize()
    ints: list[int] = buffer.tolist()
    return ints


def staged_bytes(fields: Fields) -> int:
    """Computes the bytes that the tensors of a step take in a buffer."""
    return sum(_room(field) for field in fields if field is not None)


def _views(buffer: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    views, start = [], 0
    for field in like:
        size = field.numel() * field.element_size()
        views.append(buffer[start : start + size].view(field.dtype).view(field.shape))
        start += _room(field)
    return views


def _room(field: Tensor) -> int:
    return math.ceil(field.numel() * field.element_size() / _ALIGNMENT) * _ALIGNMENT
