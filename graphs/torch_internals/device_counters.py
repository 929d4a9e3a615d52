"""Counts what XLA and Gaudi's bridge compiled, by their public counters, where they are imported.

`torch_xla.debug.metrics` has the metric `CompileTime` and the counter `UncachedCompile`;
`habana_frameworks.torch.hpu.metrics` has the metric `graph_compilation`.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["DeviceCounters"]

_log = logging.getLogger(__name__)


class DeviceCounters:
    """Counts of graphs that device compilers compiled in this process since it was made."""

    def __init__(self) -> None:
        self._unreadable: set[str] = set()
        self._before = self._read()

    def new(self) -> dict[str, int]:
        """How many were compiled since the last call, by the name of the compiler."""
        now, before = self._read(), self._before
        self._before = now
        # A counter that is smaller than before was cleared in between.
        counts = {
            name: count - before.get(name, 0) if count >= before.get(name, 0) else count
            for name, count in now.items()
        }
        return {name: count for name, count in counts.items() if count}

    def _read(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for name, (package, module, count) in _COUNTERS.items():
            if package in sys.modules and name not in self._unreadable:
                try:
                    found[name] = count(importlib.import_module(module))
                except Exception as error:  # whatever a bridge without its device raises
                    self._unreadable.add(name)
                    _log.warning("compiles of %s cannot be counted: %s", name, error)
        return found


def _xla(metrics: Any) -> int:
    # Graphs of a Dynamo backend are only in the first, graphs from another process's cache too.
    timed = metrics.metric_data("CompileTime")
    return max(int(timed[0]) if timed else 0, int(metrics.counter_value("UncachedCompile") or 0))


def _gaudi(metrics: Any) -> int:
    return int(dict(metrics.metric_global("graph_compilation").stats())["TotalNumber"])


_COUNTERS: dict[str, tuple[str, str, Callable[[Any], int]]] = {
    "XLA": ("torch_xla", "torch_xla.debug.metrics", _xla),
    "Gaudi": ("habana_frameworks.torch", "habana_frameworks.torch.hpu.metrics", _gaudi),
}
