"""Any callable as an ``nn.Module``, for systems that capture nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from graphs.capture.inputs import Input

__all__ = ["as_module"]


def as_module(function: Callable[..., Any]) -> nn.Module:
    """The function itself if it is a module, else a module that calls it."""
    return function if isinstance(function, nn.Module) else _Function(function)


class _Function(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, *inputs: Input) -> Any:
        return self._function(*inputs)
