"""``compiled-attn cache``: the store that ``compiled-attn run`` starts from."""

from __future__ import annotations

from pathlib import Path

import graphs.cli.cache
from compiled_attn.cli.errors import UserError
from graphs.store.cache_folder import cache_folder

__all__ = ["DEFAULT_STORE", "cache", "default_store"]

DEFAULT_STORE = "~/.cache/compiled-attn"
"""The default store, as help tells it: where it is unless a variable or the platform differ."""


def default_store() -> Path:
    """The folder of the default store.

    Raises:
        StoreError: nobody knows where the user's home is.
    """
    return cache_folder("compiled-attn")


cache = graphs.cli.cache.cache_app(DEFAULT_STORE, UserError, find=default_store)
