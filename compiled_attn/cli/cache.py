"""``compiled-attn cache``: the store that ``compiled-attn run`` starts from."""

from __future__ import annotations

import graphs.cli.cache
from compiled_attn.cli.errors import UserError

__all__ = ["DEFAULT_STORE", "cache"]

DEFAULT_STORE = "~/.cache/compiled-attn"

cache = graphs.cli.cache.cache_app(DEFAULT_STORE, UserError)
