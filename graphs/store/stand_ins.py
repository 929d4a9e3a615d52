"""Stand-ins for what a graph of the store imports of inductor's code generator and hardly uses.

The wrapper that inductor writes around its kernels imports its generator for a function of one line
and for a table of torch's matrix products, and what loads and calls it does for hooks of its tests
and debugger: two seconds of imports in a process that compiles nothing.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any

import torch

__all__ = ["standing_in"]

_LOCK = threading.RLock()
_OP = re.compile(rb"torch\.ops\.(\w+)\.(\w+)\b")
_KERNELS = "torch._inductor.select_algorithm"
_DECOMPOSITIONS = "torch._inductor.decomposition"
_DEBUGGER = "torch._inductor.debug"


@contextlib.contextmanager
def standing_in(graph: bytes) -> Iterator[None]:
    """Replaces modules that are not imported yet, while a graph is read.

    Whoever asks a stand-in for more than it has gets it of the real module.

    Args:
        graph: as it was stored; one with ops that only the generator registers gets no stand-ins.
    """
    if not all(_is_there(*match.groups()) for match in _OP.finditer(graph)):
        yield
        return
    with _LOCK:
        names = _CONTENTS.keys() - sys.modules.keys()
        sys.modules.update({name: _StandIn(name) for name in names})
        try:
            yield
        finally:
            for name in names:
                _leave(name)
        if not hasattr(torch._inductor, "debug"):  # no import finds it, and each call looks there
            torch._inductor.debug = _StandIn(_DEBUGGER, RECORD_GRAPH_EXECUTION=False)


class _StandIn(ModuleType):
    def __init__(self, name: str, **contents: Any) -> None:
        super().__init__(name)
        vars(self).update(contents or _CONTENTS[name]())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_real(self.__name__), name)


class _Kernels:
    """Inductor's `extern_kernels`: those that are torch's own functions, others of the real one."""

    def __init__(self) -> None:
        self.mm, self.addmm = torch.mm, torch.addmm
        self.bmm, self.baddbmm = torch.bmm, torch.baddbmm

    def __getattr__(self, name: str) -> Any:
        found = getattr(_real(_KERNELS).extern_kernels, name)
        setattr(self, name, found)
        return found


def _decompositions(*args: Any) -> Any:
    return _real(_DECOMPOSITIONS).select_decomp_table(*args)


_CONTENTS: Mapping[str, Callable[[], dict[str, Any]]] = MappingProxyType(
    {
        "torch._inductor.codegen.memory_planning": lambda: {
            "_align": importlib.import_module("torch._inductor.utils")._align
        },
        _KERNELS: lambda: {"extern_kernels": _Kernels()},
        "torch._inductor.graph": lambda: {"GraphLowering": SimpleNamespace(save_output_code=None)},
        _DECOMPOSITIONS: lambda: {"select_decomp_table": _decompositions},
    }
)


def _real(name: str) -> Any:
    with _LOCK:
        _leave(name)
        return importlib.import_module(name)


def _leave(name: str) -> None:
    if isinstance(sys.modules.get(name), _StandIn):
        del sys.modules[name]


def _is_there(namespace: bytes, op: bytes) -> bool:
    return hasattr(getattr(torch.ops, namespace.decode()), op.decode())
