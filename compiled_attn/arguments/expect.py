"""Checks of arguments that all interfaces share: expected, got, remedy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compiled_attn.arguments.overlap import overlap

__all__ = ["FLOATS", "INTS", "Expect", "is_number", "slot_used_twice"]

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
INTS = (torch.int32, torch.int64)


@dataclass(frozen=True)
class Expect:
    """The checks of one interface, which raise its error; what is no tensor is a TypeError.

    Attributes:
        error: what does not fit.
        dtype_error: a tensor of another dtype.
        prefix: start of every message.
        remedy: what helps against a shape that does not fit.
    """

    error: type[Exception]
    dtype_error: type[Exception]
    prefix: str = ""
    remedy: str = "match the other arguments"

    def __call__(self, holds: bool, expected: str, got: object, remedy: str) -> None:
        """Raises unless something holds."""
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
        """Raises unless it is a tensor of a shape (None: any size), a dtype, another's device."""
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
            wanted = " or ".join(_short(dtype) for dtype in dtypes)
            self._fail_dtype(f"{name} of dtype {wanted}", _short(value.dtype))
        if like is not None and value.device != like.device:
            self._fail(f"{name} on {like.device}", value.device, "move it with .to()")

    def unit_stride(self, **tensors: Tensor) -> None:
        """Raises unless the elements of each last axis lie one behind the other."""
        for name, tensor in tensors.items():
            if tensor.stride(-1) != 1 and tensor.shape[-1] != 1:
                self._fail(f"{name} of stride(-1) == 1", tensor.stride(), "call .contiguous()")

    def contiguous(self, **tensors: Tensor) -> None:
        """Raises unless each is contiguous."""
        for name, tensor in tensors.items():
            if not tensor.is_contiguous():
                self._fail(f"contiguous {name}", tensor.stride(), "call .contiguous()")

    def not_expanded(self, *caches: Tensor) -> None:
        """Raises unless what is written has memory for each of its elements."""
        for cache in caches:
            steps = zip(cache.stride(), cache.shape, strict=True)
            own = all(step or size == 1 for step, size in steps)
            self(own, "caches without expanded axes", cache.stride(), "clone the cache to write")

    def apart(self, written: Mapping[str, object], read: Mapping[str, object]) -> None:
        """Raises where something read shares memory with something written: `overlap`."""
        found = overlap(written, read)
        if found is not None:
            self._fail(f"{found[0]} apart from {found[1]}", "shared memory", "call .clone()")

    def heads(self, heads: int, kv_heads: int, count: str = "Hk") -> None:
        """Raises unless each KV head serves as many query heads."""
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
    """Whether a value is a number, of a compiler's too."""
    return isinstance(value, (int, float, torch.SymInt, torch.SymFloat))


def slot_used_twice(slots: Tensor) -> int | None:
    """A slot that occurs more than once, or None."""
    ordered = slots.sort().values
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    return int(twice[0]) if twice.numel() else None


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
