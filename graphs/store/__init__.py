"""A cache of compiled graphs on disk: a second start takes seconds.

Names are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphs.lazy import lazy_names

if TYPE_CHECKING:
    from graphs.errors import StoreBusy as StoreBusy
    from graphs.errors import StoreError as StoreError
    from graphs.errors import UnsafeStore as UnsafeStore
    from graphs.store.entry import Entry as Entry
    from graphs.store.factors import environment_factors as environment_factors
    from graphs.store.factors import graph_factors as graph_factors
    from graphs.store.factors import key_of as key_of
    from graphs.store.inductor import StoredInductor as StoredInductor
    from graphs.store.inductor_cache import InductorCache as InductorCache
    from graphs.store.store import ArtifactStore as ArtifactStore
    from graphs.store.stored import StoredAoti as StoredAoti

_MODULES = {
    "entry": "Entry",
    "factors": "environment_factors graph_factors key_of",
    "inductor": "StoredInductor",
    "inductor_cache": "InductorCache",
    "lock": "StoreBusy",
    "safety": "UnsafeStore",
    "store": "ArtifactStore StoreError",
    "stored": "StoredAoti",
}
if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _MODULES)
__all__ = sorted(" ".join(_MODULES.values()).split())
