"""Describes the call that Dynamo compiled, without its contents.

A description is plain JSON data. Of tensors it has shape, stride, dtype, device and whether they
require gradients; of other values only None, booleans and whole numbers are in it. Text, floating
point numbers and objects may be a user's data: of them only the type is.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import CellType, CodeType
from typing import Any

import torch
from torch import Tensor

__all__ = ["DEEPEST", "describe_call"]

DEEPEST = 6
_MOST_VALUES = 512
_AUTOCAST = ("cpu", "cuda", "xpu", "hpu")


def describe_call(code: CodeType, module: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Describe a call of a function.

    Args:
        code: of the function.
        module: name of the function's module.
        values: its parameters by name, at its entry.
    """
    names = iter(code.co_varnames)
    positional = [next(names) for _ in range(code.co_argcount)]
    keywords = [next(names) for _ in range(code.co_kwonlyargcount)]
    has_more = bool(code.co_flags & inspect.CO_VARARGS)
    more = _value(values, next(names)) if has_more else ()
    rest = _value(values, next(names)) if code.co_flags & inspect.CO_VARKEYWORDS else {}
    is_method = positional[:1] == ["self"]
    given = [_value(values, name) for name in positional[is_method:]]
    given += [*more] if isinstance(more, tuple) else []
    by_name = {name: _value(values, name) for name in keywords}
    by_name |= rest if isinstance(rest, dict) else {}
    count = [0]
    return {
        "function": f"{module.replace('__mp_main__', '__main__')}:{code.co_qualname}",
        "args": [_describe(value, count) for value in given],
        "kwargs": {str(name): _describe(value, count) for name, value in by_name.items()},
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": {
            device: _plain(torch.get_autocast_dtype(device))
            for device in _AUTOCAST
            if torch.is_autocast_enabled(device)
        },
    }


def _value(values: Mapping[str, Any], name: str) -> Any:
    value = values.get(name)
    if not isinstance(value, CellType):  # an argument that an inner function uses
        return value
    try:
        return value.cell_contents
    except ValueError:
        return None


def _plain(value: object) -> str:
    return str(value).removeprefix("torch.")


def _describe(value: Any, count: list[int], depth: int = 0) -> dict[str, Any]:
    count[0] += 1
    kind = type(value)
    if depth > DEEPEST or count[0] > _MOST_VALUES:
        return {"type": f"{kind.__name__} among too many values"}
    if kind is Tensor:
        return _describe_tensor(value)
    if value is None or kind is bool or kind is int:
        return {"value": value}
    if kind in (list, tuple):
        return {kind.__name__: [_describe(each, count, depth + 1) for each in value]}
    if kind is dict and all(type(key) is str and key.isidentifier() for key in value):
        items = {key: _describe(each, count, depth + 1) for key, each in value.items()}
        return {"dict": items}
    return {"type": kind.__name__}


def _describe_tensor(value: Tensor) -> dict[str, Any]:
    if value.layout is not torch.strided or value.is_quantized:
        return {"type": f"{_plain(value.layout)} tensor of {_plain(value.dtype)}"}
    sizes = {"shape": [*value.shape], "stride": [*value.stride()]}
    if not all(type(size) is int for size in (*sizes["shape"], *sizes["stride"])):
        return {"type": "tensor of symbolic sizes"}
    found = {**sizes, "dtype": _plain(value.dtype), "device": str(value.device)}
    return found | ({"requires_grad": True} if value.requires_grad else {})
