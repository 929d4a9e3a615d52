"""Parameters whose values are packed elsewhere, and detection of writes to them.

Such a parameter keeps its dtype and shape but has no memory of its own: all elements of all of them
alias one number, a NaN. Torch refuses most writes to such memory. The others, such as `fill_` or a
write through a numpy view, change that number, which is cheap to check before each step.
"""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from compiled_attn.errors import ModelChanged

__all__ = ["PackedWeight", "WriteTrap"]

# Signalling NaNs: arithmetic turns them into quiet ones, so that even `weight *= 1` is detected.
_SIGNALLING = {
    torch.float64: (np.int64, 0x7FF4000000000000),
    torch.float32: (np.int32, 0x7FA00000),
    torch.bfloat16: (np.int16, 0x7FA0),
    torch.float16: (np.int16, 0x7D00),
}


class WriteTrap:
    """The number that packed weights of one dtype share.

    Args:
        dtype: a float of at least 16 bits.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        integers, self._before = _SIGNALLING[dtype]
        self._seen = np.full(1, self._before, integers)  # numpy memory, which is never reallocated
        self._number = torch.from_numpy(self._seen).view(dtype)
        self._address = self._number.data_ptr()

    @property
    def is_sprung(self) -> bool:
        """Whether a weight that aliases the number was written to, or moved (`share_memory_`)."""
        is_same = self._seen.item() == self._before and self._number.data_ptr() == self._address
        return not is_same

    def expanded(self, shape: torch.Size) -> Tensor:
        """Returns the number expanded to a shape."""
        return self._number.expand(shape)

    def is_in(self, tensor: Tensor) -> bool:
        """Whether a tensor aliases the number."""
        return tensor.data_ptr() == self._address

    def __reduce__(self) -> tuple[Any, ...]:
        return WriteTrap, (self.dtype,)


class PackedWeight(Parameter):
    """A parameter whose values are in its layer's ``packed``; read them with ``state_dict()``.

    Its elements are NaN. Writes are refused by torch or by this class, or raise `ModelChanged` in
    the next step of an engine. `hide` turns a parameter into one, `reveal` undoes that.
    """

    trap: WriteTrap

    @staticmethod
    def hide(parameter: Parameter, trap: WriteTrap) -> None:
        """Turns a parameter into a packed weight, which releases its memory."""
        parameter.trap = trap  # type: ignore[attr-defined]
        parameter.__class__ = PackedWeight
        _set_data(parameter, trap.expanded(parameter.shape))

    @staticmethod
    def reveal(parameter: Parameter, values: Tensor) -> None:
        """Turns it into a plain parameter with these values; no-op for one that is not hidden."""
        if isinstance(parameter, PackedWeight):
            _set_data(parameter, values)
            parameter.__class__ = Parameter  # type: ignore[assignment]
            del parameter.trap

    @property
    def data(self) -> Tensor:
        """NaN, in memory shared with other weights."""
        return Tensor.data.__get__(self)  # type: ignore[attr-defined, no-any-return]

    @data.setter
    def data(self, values: Tensor) -> None:
        if self.trap.is_in(values):
            return
        is_cast = values.dtype is not self.dtype or values.device != self.device
        if not (is_cast and values.isnan().all()):
            self._refuse("other data")
        # Its NaN, cast or moved together with the model.
        if values.device.type == "cpu":
            PackedWeight.hide(self, WriteTrap(values.dtype))
        else:
            PackedWeight.reveal(self, values)

    @property
    def requires_grad(self) -> bool:
        """False: integers have no gradients."""
        return False

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        if value:
            self._refuse("requires_grad")

    def requires_grad_(self, requires_grad: bool = True) -> PackedWeight:
        """Refuses gradients."""
        self.requires_grad = requires_grad
        return self

    def set_(self, *_: Any, **__: Any) -> NoReturn:
        """Refuses other memory."""
        self._refuse("set_()")

    def resize_(self, *_: Any, **__: Any) -> NoReturn:
        """Refuses another size."""
        self._refuse("resize_()")

    def _refuse(self, got: str) -> NoReturn:
        raise ModelChanged(
            f"expected a weight of {self.dtype} {[*self.shape]} that an engine has packed to stay "
            f"unchanged, got {got}: write new values with load_state_dict() of the model or layer, "
            "or load the model again"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Parameter:
        trap = memo.setdefault(id(self.trap), WriteTrap(self.dtype))
        memo[id(self)] = copied = _rebuilt(self.shape, trap)
        return copied

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        return _rebuilt, (self.shape, self.trap)


def _set_data(parameter: Parameter, values: Tensor) -> None:
    Tensor.data.__set__(parameter, values)  # type: ignore[attr-defined]


def _rebuilt(shape: torch.Size, trap: WriteTrap) -> Parameter:
    parameter = Parameter(trap.expanded(shape), requires_grad=False)
    PackedWeight.hide(parameter, trap)
    return parameter
