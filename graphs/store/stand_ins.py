"""Stand-ins for what a graph of the store imports of inductor's code generator and hardly uses.

The wrapper that inductor writes around its kernels imports its generator for a function of one line
and for a table of torch's matrix products, and what loads and calls the wrapper does so for hooks
of its tests and debugger: two seconds of imports in a process that compiles nothing.
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

_LOCK = threading.Lock()
_OP = re.compile(rb"torch\.ops\.(\w+)\.(\w+)\b")
_KERNELS = "torch._inductor.select_algorithm"
_DECOMPOSITIONS = "torch._inductor.decomposition"
_DEBUGGER = "torch._inductor.debug"


@contextlib.contextmanager
def standing_in(graph: bytes) -> Iterator[None]:
    """Replaces modules that are not imported yet, while this thread reads a graph.

    Whoever asks a stand-in for more than it has gets it from the real module, and so does any other
    thread, which may be importing the generator for good.

    Args:
        graph: as it was stored; one with ops that only the generator registers gets no stand-ins.
    """
    if not all(_is_there(*match.groups()) for match in _OP.finditer(graph)):
        yield
        return
    own = {name: _StandIn(name, make()) for name, make in _CONTENTS.items()}
    try:
        for name, module in own.items():
            sys.modules.setdefault(name, module)
        yield
    finally:
        for name in own:
            _leave(name)
    if not hasattr(torch._inductor, "debug"):  # no import finds it, and each call looks there
        debugger = _StandIn(_DEBUGGER, {})
        vars(debugger)["RECORD_GRAPH_EXECUTION"] = False  # for all threads
        torch._inductor.debug = debugger


class _StandIn(ModuleType):
    def __init__(self, name: str, contents: Mapping[str, Any]) -> None:
        super().__init__(name)
        self._contents, self._thread = contents, threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in self._contents and threading.get_ident() == self._thread:
            return self._contents[name]
        return getattr(_real(self.__name__), name)


class _Kernels:
    """Inductor's `extern_kernels`: torch's own functions, others from the real one."""

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
    _leave(name)
    return importlib.import_module(name)


def _leave(name: str) -> None:
    with _LOCK:  # or another thread may have imported the real one in between
        if isinstance(sys.modules.get(name), _StandIn):
            del sys.modules[name]


def _is_there(namespace: bytes, op: bytes) -> bool:
    return hasattr(getattr(torch.ops, namespace.decode()), op.decode())
