"""Compiled artifacts on disk: a second start in seconds, and nothing wrong is ever loaded."""

from __future__ import annotations

from graphs.errors import StoreBusy, StoreError, UnsafeStore
from graphs.store.aoti import StoredAoti
from graphs.store.entry import Entry
from graphs.store.factors import environment_factors, graph_factors, key_of
from graphs.store.inductor import StoredInductor
from graphs.store.inductor_cache import InductorCache
from graphs.store.store import ArtifactStore

__all__ = [
    "ArtifactStore",
    "Entry",
    "InductorCache",
    "StoreBusy",
    "StoreError",
    "StoredAoti",
    "StoredInductor",
    "UnsafeStore",
    "environment_factors",
    "graph_factors",
    "key_of",
]
