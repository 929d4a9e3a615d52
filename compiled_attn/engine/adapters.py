"""The named LoRA adapters of an engine."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Set
from pathlib import Path
from typing import NamedTuple

from compiled_attn.cache.blocks.prefix import Salt
from compiled_attn.engine.config import ConfigError
from compiled_attn.errors import AdapterError
from compiled_attn.models.adapters import Adapter, AdapterPool, read_adapter
from graphs.errors import quoted

__all__ = ["NamedAdapters", "ServedAdapter"]


class ServedAdapter(NamedTuple):
    """Where an adapter is.

    Args:
        slot: its slot in the pool.
        key: random, so that its requests share cached prefixes with no others: neither with those
            of another adapter, nor with those of an earlier one of the same name.
    """

    slot: int
    key: bytes

    def salt(self, salt: Salt) -> bytes:
        """Returns the salt of its requests that have this one of their own."""
        match salt:
            case None:
                return self.key
            case str():
                return self.key + b"str:" + salt.encode()
        return self.key + b"bytes:" + salt


class NamedAdapters:
    """Adds and removes adapters while others are in use.

    A slot is free if it has no name and no open request uses it, so nothing has to be released
    when a request ends.

    Args:
        pool: of the executor; None: it has none.
        slots_in_use: returns the slots of all open requests.
    """

    def __init__(self, pool: AdapterPool | None, slots_in_use: Callable[[], Set[int]]) -> None:
        self._pool, self._slots_in_use = pool, slots_in_use
        self._by_name: dict[str, ServedAdapter] = {}

    @property
    def names(self) -> list[str]:
        """Names of the adapters, in the order in which they were added."""
        return [*self._by_name]

    def add(self, name: str, source: str | Path | Adapter) -> None:
        """See `Engine.add_adapter`."""
        if not isinstance(name, str) or not name:
            raise ConfigError(f"expected a name for an adapter, got {quoted(name)}: pass a text")
        pool = self._pool_for(name)
        if name in self._by_name:
            raise AdapterError(
                f"expected a new name for an adapter, got {name!r}: remove that one first"
            )
        adapter = source if isinstance(source, Adapter) else read_adapter(source)
        pool.check(adapter)
        used = {each.slot for each in self._by_name.values()} | self._slots_in_use()
        slot = next((each for each in range(1, pool.slots) if each not in used), None)
        if slot is None:
            raise AdapterError(
                f"expected at most {pool.slots - 1} adapters, got {name!r} with "
                f"{len(self._by_name)} that have names and {len(used) - len(self._by_name)} that "
                "requests still use: remove one, wait, or raise max_adapters (--max-adapters)"
            )
        pool.write(slot, adapter)
        self._by_name[name] = ServedAdapter(slot, secrets.token_bytes(16))

    def remove(self, name: str) -> None:
        """See `Engine.remove_adapter`."""
        if name not in self._by_name:
            raise self._unknown(name)
        del self._by_name[name]

    def of(self, name: str | None) -> ServedAdapter | None:
        """Returns the adapter of a request; None: it has none.

        Raises:
            ConfigError: there is no adapter of that name.
        """
        if name is None:
            return None
        if (found := self._by_name.get(name)) is None:
            raise self._unknown(name)
        return found

    def _pool_for(self, name: str) -> AdapterPool:
        if self._pool is None:
            raise AdapterError(
                f"expected an engine with adapters for {name!r}, got max_adapters 0: set "
                "max_adapters (--max-adapters)"
            )
        return self._pool

    def _unknown(self, name: str) -> ConfigError:
        known = ", ".join(itertools.islice(self._by_name, 8)) or "there are none"
        return ConfigError(f"expected the name of an adapter ({known}), got {quoted(name)}: add it")
