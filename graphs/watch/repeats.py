"""Makes a call again from its description, see :mod:`graphs.watch.calls`."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from graphs.capture.memory import machine_bytes
from graphs.errors import clipped, quoted
from graphs.watch.calls import DEEPEST

__all__ = ["CannotRepeat", "check_call", "inputs_of_call", "under_modes_of"]


class CannotRepeat(ValueError):
    """A call cannot be made from its description; the message says why."""


def check_call(call: object) -> dict[str, Any]:
    """Return a description that comes from a file.

    Raises:
        ValueError: it has not the form of one; the message is one short line.
    """
    kinds = {"function": str, "args": list, "kwargs": dict, "grad": bool, "inference": bool}
    if not isinstance(call, dict):
        raise ValueError(f"expected a call, got {quoted(call)}")
    for key, kind in (kinds | {"autocast": dict}).items():
        if not isinstance(call.get(key), kind):
            raise ValueError(f"expected {key} to be a {kind.__name__}, got {quoted(call.get(key))}")
    for value in (*call["args"], *call["kwargs"].values()):
        _check(value, 0)
    return call


def inputs_of_call(call: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Make inputs like those of a call: tensors of zeros (whole numbers, booleans) or ones.

    Raises:
        CannotRepeat: one of them cannot be made here.
    """
    args = [_make(value, f"input {index}") for index, value in enumerate(call["args"])]
    return args, {name: _make(value, f"input '{name}'") for name, value in call["kwargs"].items()}


@contextlib.contextmanager
def under_modes_of(call: Mapping[str, Any]) -> Iterator[None]:
    """Context manager for grad mode, inference mode and autocast as they were in a call.

    Raises:
        CannotRepeat: there is no such autocast here.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(call["inference"]))
        if not call["inference"]:
            stack.enter_context(torch.set_grad_enabled(call["grad"]))
        for device, name in call["autocast"].items():
            try:
                stack.enter_context(torch.autocast(device, _dtype(name)))
            except RuntimeError as error:
                raise CannotRepeat(f"autocast of {quoted(device)}: {error}") from error
        yield


def _check(value: object, depth: int) -> None:
    if not isinstance(value, dict) or depth > DEEPEST + 1:
        raise ValueError(f"expected the description of an input, got {quoted(value)}")
    if "shape" in value:
        sizes = value["shape"], value.get("stride")
        if not all(map(_are_sizes, sizes)) or len(sizes[0]) != len(sizes[1] or ()):
            raise ValueError(f"expected sizes and as many strides, got {quoted(value)}")
        if not (type(value.get("dtype")) is str and type(value.get("device")) is str):
            raise ValueError(f"expected a dtype and a device, got {quoted(value)}")
        return
    parts = next((value[key] for key in ("list", "tuple") if key in value), None)
    parts = [*value["dict"].values()] if isinstance(value.get("dict"), dict) else parts
    if parts is not None:
        if not isinstance(parts, list):
            raise ValueError(f"expected a list of inputs, got {quoted(parts)}")
        for part in parts:
            _check(part, depth + 1)
        return
    has_value = "value" in value and type(value["value"]) in (bool, int, type(None))
    if not has_value and type(value.get("type")) is not str:
        raise ValueError(f"expected the description of an input, got {quoted(value)}")


def _are_sizes(sizes: object) -> bool:
    return isinstance(sizes, list) and all(type(size) is int and size >= 0 for size in sizes)


def _make(value: Mapping[str, Any], name: str) -> Any:
    if "shape" in value:
        return _make_tensor(value, name)
    if "value" in value:
        return value["value"]
    for key, kind in (("list", list), ("tuple", tuple)):
        if key in value:
            return kind(_make(each, f"{name}[{i}]") for i, each in enumerate(value[key]))
    if "dict" in value:
        return {key: _make(each, f"{name}['{key}']") for key, each in value["dict"].items()}
    raise CannotRepeat(f"{name} is a {clipped(value['type'], 80)}, which the file has no value of")


def _make_tensor(value: Mapping[str, Any], name: str) -> Tensor:
    shape: Sequence[int] = value["shape"]
    dtype = _dtype(value["dtype"])
    fill = 1 if dtype.is_floating_point or dtype.is_complex else 0
    steps = zip(shape, value["stride"], strict=True)
    elements = 1 + sum((size - 1) * stride for size, stride in steps) if math.prod(shape) else 0
    needed, available = elements * dtype.itemsize, machine_bytes()
    if available is not None and needed > available:
        raise CannotRepeat(f"{name} takes {needed:,} bytes, but there are {available:,}")
    try:
        flat = torch.full((elements,), fill, dtype=dtype, device=value["device"])
        made = flat.as_strided(shape, value["stride"])
        return made.requires_grad_() if value.get("requires_grad") else made
    except (RuntimeError, TypeError, AssertionError, NotImplementedError, OverflowError) as error:
        reason = str(error).split("\n")[0]
        raise CannotRepeat(f"{name} cannot be made here: {clipped(reason, 200)}") from error


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CannotRepeat(f"torch has no dtype {quoted(name)}")
    return dtype
