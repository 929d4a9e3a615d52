"""A stub of Intel's bridge to Gaudi: it checks calls and their order, not the hardware."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn


class Bridge:
    """What habana_frameworks.torch would do, on the CPU, with a log of the calls."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.is_lazy = True
        self.has_device = True
        self.shapes: dict[int, list[torch.Size]] = {}
        self.wrapped: list[nn.Module] = []  # kept, so that no other gets its id

    def wrap_in_hpu_graph(self, module, *, disable_tensor_cache=False):
        assert isinstance(module, nn.Module), "the bridge wraps modules only"
        assert disable_tensor_cache
        assert not any(module is other for other in self.wrapped), "wrapped twice"
        self.wrapped.append(module)
        self.log.append("wrap")

        def call(*inputs):
            shapes = [tensor.shape for tensor in inputs if isinstance(tensor, torch.Tensor)]
            is_new = self.shapes.setdefault(id(module), shapes) is shapes
            assert self.shapes[id(module)] == shapes, "one graph has one shape"
            self.log.append("record" if is_new else "replay")
            return module(*inputs)

        return call

    def mark_step(self):
        self.log.append("mark")


def stubbed_bridge(monkeypatch: pytest.MonkeyPatch) -> Bridge:
    """The stub where `graphs.backends.hpu` looks for the bridge."""
    stub = Bridge()
    top = ModuleType("habana_frameworks")
    top.__spec__ = ModuleSpec("habana_frameworks", None)
    inner = ModuleType("habana_frameworks.torch")
    inner.hpu = SimpleNamespace(
        wrap_in_hpu_graph=stub.wrap_in_hpu_graph, is_available=lambda: stub.has_device
    )
    inner.core = SimpleNamespace(mark_step=stub.mark_step)
    internal = ModuleType("habana_frameworks.torch.utils.internal")
    internal.is_lazy = lambda: stub.is_lazy
    utils = ModuleType("habana_frameworks.torch.utils")
    for module in (top, inner, utils, internal):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return stub
