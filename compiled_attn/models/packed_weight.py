"""Detects writes to parameters whose values are packed elsewhere.

Such a parameter has its dtype and shape but no memory of its own: all elements of all of them alias
one number, a NaN. Torch refuses most writes to such memory. The others, such as `fill_` or a write
through a numpy view, change that number or the parameter's address, which is cheap to check before
each step. On a device, which would be waited for, only the address is checked.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["WriteTrap"]

# Signalling NaNs: arithmetic turns them into quiet ones, so that even `weight *= 1` is detected.
_SIGNALLING = {
    torch.float64: (np.int64, 0x7FF4000000000000),
    torch.float32: (np.int32, 0x7FA00000),
    torch.bfloat16: (np.int16, 0x7FA0),
    torch.float16: (np.int16, 0x7D00),
}


class WriteTrap:
    """The number of each dtype that the packed weights of a model alias."""

    def __init__(self) -> None:
        # Of each dtype numpy memory, which is never reallocated, and the tensor over it.
        self._numbers: dict[torch.dtype, tuple[NDArray[Any], Tensor]] = {}
        self._on_devices: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def hide(self, parameter: Tensor) -> None:
        """Points a parameter to the number of its dtype, which releases its memory."""
        if (number := self._number(parameter)) is not None:
            parameter.data = number.expand(parameter.shape)

    def is_hidden(self, parameter: Tensor) -> bool:
        """Whether a parameter aliases the number of its dtype."""
        if parameter.device.type == "cpu":
            _, known = self._numbers.get(parameter.dtype, (None, None))
        else:
            known = self._on_devices.get((parameter.device, parameter.dtype))
        return known is not None and parameter.data_ptr() == known.data_ptr()

    def addresses(self, parameters: Iterable[Tensor]) -> list[int]:
        """Returns the addresses of parameters that were not written to."""
        numbers = ((each, self._number(each)) for each in parameters)
        return [(each if number is None else number).data_ptr() for each, number in numbers]

    @property
    def is_sprung(self) -> bool:
        """Whether a number was written to, or moved (`share_memory_`)."""
        return any(
            memory.item() != _SIGNALLING[dtype][1] or number.data_ptr() != memory.ctypes.data
            for dtype, (memory, number) in self._numbers.items()
        )

    def _number(self, parameter: Tensor) -> Tensor | None:
        dtype, device = parameter.dtype, parameter.device
        if parameter.is_meta or dtype not in _SIGNALLING:
            return None
        if device.type != "cpu":
            if (device, dtype) not in self._on_devices:
                self._on_devices[device, dtype] = parameter.new_full((1,), float("nan"))
            return self._on_devices[device, dtype]
        if dtype not in self._numbers:
            integers, bits = _SIGNALLING[dtype]
            memory = np.full(1, bits, integers)
            number = torch.from_numpy(memory).view(dtype)
            self._numbers[dtype] = memory, number
        return self._numbers[dtype][1]

    def __reduce__(self) -> tuple[Any, ...]:
        return WriteTrap, ()
