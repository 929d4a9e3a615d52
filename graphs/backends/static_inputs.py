"""Inputs at fixed addresses: one buffer for each, of which every graph uses the part it needs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from graphs.capture.inputs import Input

__all__ = ["StaticInputs"]

_ALIGNMENT = 256


class StaticInputs:
    """Buffers shared by all graphs of one callable, which run one at a time.

    The first capture decides how large they are, so capture the largest first. A graph that needs
    more gets a buffer of its own: those that are captured stay where they are.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[int, torch.device], Tensor] = {}

    def of(self, examples: Sequence[Input]) -> list[Input]:
        """What a graph is captured on: constants as they are, tensors at fixed addresses, filled.

        A tensor keeps its shape and strides.
        """
        # An inference tensor has no version, so its writes would not be seen.
        with torch.inference_mode(False), torch.no_grad():
            return [
                self._view(place, value).copy_(value) if isinstance(value, Tensor) else value
                for place, value in enumerate(examples)
            ]

    def _view(self, place: int, like: Tensor) -> Tensor:
        extent = 1 + sum((n - 1) * step for n, step in zip(like.shape, like.stride(), strict=True))
        needed = extent * like.element_size() if like.numel() else 0
        flat = self._buffer(place, like.device, needed)[:needed].view(like.dtype)
        return flat.as_strided(like.shape, like.stride())

    def _buffer(self, place: int, device: torch.device, needed: int) -> Tensor:
        buffer = self._buffers.get((place, device))
        if buffer is None or buffer.numel() < needed:
            size = max(_ALIGNMENT, math.ceil(needed / _ALIGNMENT) * _ALIGNMENT)
            buffer = torch.zeros(size, dtype=torch.uint8, device=device)
            self._buffers[place, device] = buffer
        return buffer
