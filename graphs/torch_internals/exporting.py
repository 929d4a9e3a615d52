"""Exports a module without side effects on torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

__all__ = ["export_module"]

_HOOKS = "_global_buffer_registration_hooks"


def export_module(module: nn.Module, inputs: Sequence[Any]) -> torch.export.ExportedProgram:
    """Export a module, without Dynamo.

    Removes the global hook that a failed export of torch 2.11 leaves, with which no module that
    sets a buffer can be compiled.
    """
    hooks: dict[int, Any] = getattr(torch.nn.modules.module, _HOOKS, {})
    before = dict(hooks)
    try:
        return torch.export.export(module, tuple(inputs), strict=False)
    except BaseException:
        for key in [*hooks]:
            if key not in before:
                del hooks[key]
        raise
