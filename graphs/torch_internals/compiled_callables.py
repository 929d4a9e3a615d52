"""Finds the function or module behind what `torch.compile` returns."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import CodeType
from typing import Any

from torch import nn

__all__ = ["code_of_compiled"]


def code_of_compiled(value: object) -> CodeType | None:
    """The code that Dynamo compiles when `value` is called; None if `torch.compile` made it not.

    Of a module that is the code of `forward`; `module.compile()` counts too.
    """
    if isinstance(value, nn.Module):
        module = getattr(value, "_orig_mod", None)
        if module is None and getattr(value, "_compiled_call_impl", None) is not None:
            module = value
        return _code_of(type(module).forward) if isinstance(module, nn.Module) else None
    if not (inspect.isfunction(value) or inspect.ismethod(value)):
        return None
    original = vars(value).get("_torchdynamo_orig_callable")
    return _code_of(original) if callable(original) else None


def _code_of(function: Callable[..., Any]) -> CodeType | None:
    if isinstance(function, nn.Module):
        function = type(function).forward
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code if isinstance(code, CodeType) else None
