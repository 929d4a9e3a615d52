"""The named LoRA adapters of an engine."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from compiled_attn.cache.blocks.prefix import Salt
from compiled_attn.engine.config import ConfigError, EngineConfig
from compiled_attn.engine.request_state import RequestState
from compiled_attn.errors import AdapterError
from compiled_attn.models.adapters import Adapter, AdapterPool, read_adapter
from graphs import BucketSpace
from graphs.errors import quoted

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["NamedAdapters", "ServedAdapter", "adapter_pool", "with_adapters"]


def adapter_pool(
    model: PreTrainedModel, config: EngineConfig, buckets: BucketSpace
) -> AdapterPool | None:
    """Makes the slots for the adapters of a configuration; None: it has none.

    Raises:
        ConfigError: the model is not of float32 or bfloat16 on the CPU.
    """
    if not config.max_adapters:
        return None
    if model.device.type != "cpu" or model.dtype not in (torch.float32, torch.bfloat16):
        raise ConfigError(
            f"expected a model of float32 or bfloat16 on the CPU with max_adapters "
            f"{config.max_adapters}, got {model.dtype} on {model.device.type}: merge the adapter "
            "into the model"
        )
    rows = max(bucket["tokens"] for bucket in buckets)
    return AdapterPool(config.max_adapters, config.max_adapter_rank, config.adapter_targets, rows)


def with_adapters(
    config: EngineConfig, sources: Mapping[str, str | Path | Adapter]
) -> tuple[EngineConfig, dict[str, Adapter]]:
    """Reads adapters; returns a configuration with room for just these, unless it has room for
    some already.

    Raises:
        AdapterError: one cannot be read, or is of a kind that is not served.
    """
    read = {
        name: source if isinstance(source, Adapter) else read_adapter(source)
        for name, source in sources.items()
    }
    if not read or config.max_adapters:
        return config, read
    targets = {path.rpartition(".")[2] for each in read.values() for path in each.weights}
    rank = max(each.rank for each in read.values())
    return replace(
        config,
        max_adapters=len(read),
        max_adapter_rank=rank,
        adapter_targets=tuple(sorted(targets)),
    ), read


class ServedAdapter(NamedTuple):
    """Where an adapter is.

    Args:
        slot: its slot in the pool.
        key: random, so that its requests share cached prefixes with no others: neither with those
            of another adapter, nor with those of an earlier one of the same name.
    """

    slot: int
    key: bytes

    def salt(self, salt: Salt) -> Salt:
        """Returns the salt of its requests that have this one of their own."""
        if not self.slot:
            return salt
        match salt:
            case None:
                return self.key
            case str():
                return self.key + b"str:" + salt.encode()
        return self.key + b"bytes:" + salt


_NONE = ServedAdapter(0, b"")


class NamedAdapters:
    """Adds and removes LoRA adapters between steps, without a capture, while others are in use.

    Requests name theirs in `SamplingParams.adapter`. Tokens of requests with others, or without
    one, do not change. A slot is free if it has no name and no open request uses it, so nothing has
    to be released when a request ends.

    Args:
        pool: of the executor; None: it has none.
        requests: the open ones, which changes.
    """

    def __init__(self, pool: AdapterPool | None, requests: Mapping[int, RequestState]) -> None:
        self._pool, self._requests = pool, requests
        self._by_name: dict[str, ServedAdapter] = {}

    @property
    def names(self) -> list[str]:
        """Names of the adapters, in the order in which they were added."""
        return [*self._by_name]

    def add(self, name: str, source: str | Path | Adapter) -> None:
        """Adds an adapter.

        Args:
            name: for requests.
            source: folder with ``adapter_config.json`` and ``adapter_model.safetensors``, as peft
                saves them, or an `Adapter`.

        Raises:
            AdapterError: it cannot be read, is of a kind that is not served or of another base
                model, or has a larger rank than ``max_adapter_rank``; its name is in use; or there
                are ``max_adapters`` already. Nothing has changed then.
        """
        if not isinstance(name, str) or not name:
            raise ConfigError(f"expected a name for an adapter, got {quoted(name)}: pass a text")
        pool = self._pool_for(name)
        if name in self._by_name:
            raise AdapterError(
                f"expected a new name for an adapter, got {name!r}: remove that one first"
            )
        adapter = source if isinstance(source, Adapter) else read_adapter(source)
        pool.check(adapter)
        used = {each.slot for each in self._by_name.values()}
        used |= {each.adapter for each in self._requests.values()} - {0}
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
        """Removes an adapter; its open requests finish with it.

        Raises:
            ConfigError: there is no adapter of that name.
        """
        if name not in self._by_name:
            raise self._unknown(name)
        del self._by_name[name]

    def of(self, name: str | None) -> ServedAdapter:
        """Returns the adapter of a request; for no name that of slot 0.

        Raises:
            ConfigError: there is no adapter of that name.
        """
        if name is None:
            return _NONE
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
