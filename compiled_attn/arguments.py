"""Argument checks that all interfaces share: expected, got, remedy."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from graphs.torch_internals.dispatch import is_fake

__all__ = [
    "FLOATS",
    "INTS",
    "Expect",
    "can_read",
    "is_number",
    "overlap",
    "slot_used_twice",
    "whole",
]

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
INTS = (torch.int32, torch.int64)


@dataclass(frozen=True)
class Expect:
    """The checks of one interface, which raise its error; TypeError for wrong Python types.

    Attributes:
        error: raised for a value or shape that does not fit.
        dtype_error: raised for a wrong dtype.
        prefix: start of every message.
        remedy: for a shape that does not fit.
    """

    error: type[Exception]
    dtype_error: type[Exception]
    prefix: str = ""
    remedy: str = "match the other arguments"

    def __call__(self, holds: bool, expected: str, got: object, remedy: str) -> None:
        """Raises unless ``holds``."""
        if not holds:
            self._fail(expected, got, remedy)

    def tensor(
        self,
        name: str,
        value: object,
        legend: str,
        shape: Sequence[int | None],
        dtypes: Sequence[torch.dtype] | None = None,
        like: Tensor | None = None,
    ) -> None:
        """Raises unless it is a tensor of a shape (None: any size), a dtype, and on the device of
        ``like``.
        """
        if not isinstance(value, Tensor):
            raise TypeError(
                f"{self.prefix}{name}: expected a tensor {legend}, got {type(value).__name__}: "
                "pass a tensor"
            )
        if value.dim() != len(shape) or any(
            size is not None and size != own for size, own in zip(shape, value.shape, strict=True)
        ):
            sizes = ", ".join("any" if size is None else str(size) for size in shape)
            what = f"{name} {legend}".rstrip()
            self._fail(f"{what} of shape [{sizes}]", value.shape, self.remedy)
        if dtypes is not None and value.dtype not in dtypes:
            expected = " or ".join(_short(dtype) for dtype in dtypes)
            self._fail_dtype(f"{name} of dtype {expected}", _short(value.dtype))
        if like is not None and value.device != like.device:
            self._fail(f"{name} on {like.device}", value.device, "move it with .to()")

    def number(self, name: str, value: object, remedy: str = "pass a float") -> None:
        """Raises TypeError unless it is a number."""
        if not is_number(value):
            got = type(value).__name__
            raise TypeError(f"{self.prefix}{name}: expected a number, got {got}: {remedy}")

    def unit_stride(self, **tensors: Tensor) -> None:
        """Raises unless the last axis of each is dense."""
        for name, tensor in tensors.items():
            if tensor.stride(-1) != 1 and tensor.shape[-1] != 1:
                self._fail(f"{name} of stride(-1) == 1", tensor.stride(), "call .contiguous()")

    def contiguous(self, **tensors: Tensor) -> None:
        """Raises unless each is contiguous."""
        for name, tensor in tensors.items():
            if not tensor.is_contiguous():
                self._fail(f"contiguous {name}", tensor.stride(), "call .contiguous()")

    def not_expanded(self, *written: Tensor, what: str = "caches") -> None:
        """Raises if a written tensor has expanded axes."""
        for tensor in written:
            steps = zip(tensor.stride(), tensor.shape, strict=True)
            own = all(step or size == 1 for step, size in steps)
            self(own, f"{what} without expanded axes", tensor.stride(), "clone it")

    def apart(self, written: Mapping[str, object], read: Mapping[str, object]) -> None:
        """Raises if a read tensor shares memory with a written one, see `overlap`."""
        found = overlap(written, read)
        if found is not None:
            self._fail(f"{found[0]} apart from {found[1]}", "shared memory", "call .clone()")

    def heads(self, heads: int, kv_heads: int, count: str = "Hk") -> None:
        """Raises unless the query heads divide evenly among KV heads."""
        fits = kv_heads > 0 and heads > 0 and heads % kv_heads == 0
        if not fits:
            self._fail(f"H divisible by {count}", (heads, kv_heads), "share KV heads evenly")

    def _fail(self, expected: str, got: object, remedy: str) -> None:
        shown = list(got) if isinstance(got, torch.Size) else got
        raise self.error(f"{self.prefix}expected {expected}, got {shown}: {remedy}")

    def _fail_dtype(self, expected: str, got: str) -> None:
        message = f"{self.prefix}expected {expected}, got {got}: convert it with .to()"
        raise self.dtype_error(message)


def is_number(value: object) -> bool:
    """Whether a value is a number, or a compiler's symbol for one."""
    return isinstance(value, (int, float, np.integer, np.floating, torch.SymInt, torch.SymFloat))


def slot_used_twice(slots: Tensor) -> int | None:
    """Returns a slot that occurs more than once, or None."""
    ordered = slots.sort().values
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    return int(twice[0]) if twice.numel() else None


def whole(name: str, value: int, minimum: int) -> int:
    """Return ``value`` as an int of at least ``minimum``, or raise an error that names it."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"expected an integer {name}, got {value!r}: pass an int") from None
    if number < minimum:
        raise ValueError(f"expected {name} >= {minimum}, got {number}: pass a larger one")
    return number


def overlap(written: Mapping[str, object], read: Mapping[str, object]) -> tuple[str, str] | None:
    """Returns the names of a read and a written tensor that share memory, or None.

    A tensor counts as all bytes from its first element to its last. Written tensors may share
    memory with each other (interleaved keys and values). Nothing is compared while compiling or
    capturing, or for tensors without memory; other values than tensors are ignored.
    """
    tensors = [(name, each) for name, each in written.items() if isinstance(each, Tensor)]
    if not tensors or not can_read(tensors[0][1]):
        return None
    spans = [(*_span(each), name) for name, each in tensors]
    lowest, highest = min(spans)[0], max(end for _, end, _ in spans)
    for name, each in read.items():
        # Most tensors are elsewhere: one address suffices.
        if isinstance(each, Tensor) and each.data_ptr() < highest:
            first, end = _span(each)
            if end > lowest:
                for other_first, other_end, other in spans:
                    if first < other_end and other_first < end:
                        return name, other
    return None


def can_read(tensor: Tensor) -> bool:
    """Whether values may be read: not while compiling or capturing, nor of meta or fake tensors."""
    if torch.compiler.is_compiling() or is_fake(tensor):
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _span(tensor: Tensor) -> tuple[int, int]:
    """The addresses of the first byte and of one past the last."""
    first = tensor.data_ptr()
    if tensor.is_contiguous():
        return first, first + tensor.nbytes
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + (last + 1) * tensor.itemsize
