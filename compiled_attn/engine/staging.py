"""The one crossing of a step to its device: all of its tensors in one buffer, copied at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

__all__ = ["Staging", "staged_bytes"]

Fields: TypeAlias = Sequence[Tensor | None]

_ALIGNMENT = 64


class Staging:
    """A buffer in the host's memory, pinned where the device can, and its twin on the device.

    The tensors of a step are views of the twin. Those of steps of the same shapes are the same
    tensors, at the same addresses: inputs that a recorded graph may read where they are.

    Args:
        device: where steps are computed; any but the CPU.
        size: bytes of the largest step, see `staged_bytes`.
    """

    def __init__(self, device: torch.device, size: int) -> None:
        self._host = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
        self._twin = torch.zeros(size, dtype=torch.uint8, device=device)
        self._views: dict[tuple[object, ...], tuple[list[Tensor], list[Tensor]]] = {}

    def stage(self, fields: Fields) -> list[Tensor | None]:
        """The tensors of a step on the device: one copy, which the device makes when it is there.

        They hold until the next step is staged.

        Raises:
            ValueError: it is larger than the buffer.
        """
        given = [field for field in fields if field is not None]
        end = staged_bytes(given)
        if end > len(self._host):
            raise ValueError(
                f"expected a step of at most {len(self._host):,} bytes, got {end:,}: make the "
                "staging for the largest bucket"
            )
        key = tuple((field.dtype, field.shape) for field in given)
        if key not in self._views:
            self._views[key] = _views(self._host, given), _views(self._twin, given)
        hosts, twins = self._views[key]
        for host, field in zip(hosts, given, strict=True):
            host.copy_(field)
        self._twin[:end].copy_(self._host[:end], non_blocking=True)
        there = iter(twins)
        return [None if field is None else next(there) for field in fields]


def staged_bytes(fields: Fields) -> int:
    """Bytes that the tensors of a step take in a buffer."""
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
