"""A cache of compiled graphs on disk: a second start takes seconds."""

from __future__ import annotations

from graphs.errors import StoreBusy, StoreError, UnsafeStore
from graphs.store.entry import Entry
from graphs.store.factors import environment_factors, graph_factors, key_of
from graphs.store.inductor import StoredInductor
from graphs.store.inductor_cache import InductorCache
from graphs.store.store import ArtifactStore
from graphs.store.stored import StoredAoti

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
