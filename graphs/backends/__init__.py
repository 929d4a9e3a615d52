"""One file per way to freeze a callable; `base.py` is the contract."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from graphs.backends.base import Backend
from graphs.backends.eager import EagerBackend
from graphs.backends.inductor import InductorBackend

__all__ = ["BACKENDS"]

BACKENDS: Mapping[str, Backend] = MappingProxyType(
    {
        backend.name: backend
        for backend in (
            EagerBackend(),
            InductorBackend(),
            InductorBackend(name="aot_eager", compiler="aot_eager"),
        )
    }
)
