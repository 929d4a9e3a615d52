"""The named LoRA adapters of an engine."""

from __future__ import annotations

import contextlib
import itertools
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import torch

from compiled_attn.cache.blocks.prefix import Salt
from compiled_attn.engine.config import ConfigError, EngineConfig
from compiled_attn.engine.request_state import RequestState
from compiled_attn.errors import AdapterError
from compiled_attn.models.adapters import Adapter, AdapterPool, PeftAdapters, read_adapter
from compiled_attn.models.load import unwrap
from compiled_attn.ops.lora import MAX_RANK
from graphs import BucketSpace
from graphs.errors import quoted

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = [
    "NamedAdapters", "ServedAdapter", "adapter_pool", "executor_with_adapters", "with_adapters",
]  # fmt: skip

_log = logging.getLogger(__name__)


class _HasAdapters(Protocol):
    adapters: AdapterPool | None

    def close(self) -> None: ...


Made = TypeVar("Made", bound=_HasAdapters)


def adapter_pool(
    model: PreTrainedModel, config: EngineConfig, buckets: BucketSpace
) -> AdapterPool | None:
    """Makes the slots for the adapters of a configuration; None: it has none.

    Raises:
        ConfigError: the model is not of float32 or bfloat16 on the CPU.
    """
    if not config.max_adapters:
        return None
    if not _can_have_adapters(model):
        raise ConfigError(
            f"expected a model of float32 or bfloat16 on the CPU with max_adapters "
            f"{config.max_adapters}, got {model.dtype} on {model.device.type}: merge the adapter "
            "into the model"
        )
    rows = max(bucket["tokens"] for bucket in buckets)
    return AdapterPool(config.max_adapters, config.max_adapter_rank, config.adapter_targets, rows)


def _can_have_adapters(model: PreTrainedModel) -> bool:
    return model.device.type == "cpu" and model.dtype in (torch.float32, torch.bfloat16)


def with_adapters(
    config: EngineConfig, sources: Mapping[str, str | Path | Adapter]
) -> tuple[EngineConfig, dict[str, Adapter]]:
    """Reads adapters; returns a configuration with room for just these, unless it has room for
    some already.

    Raises:
        AdapterError: one cannot be read, or is of a kind that is not served.
        ConfigError: the configuration has ``same_bits``.
    """
    read = {
        name: source if isinstance(source, Adapter) else read_adapter(source)
        for name, source in sources.items()
    }
    if not read or config.max_adapters:
        return config, read
    if config.same_bits:
        names = ", ".join(map(repr, read))
        raise ConfigError(
            f"expected no adapters with same_bits, got {names}: merge them into the model"
        )
    targets = {path.rpartition(".")[2] for each in read.values() for path in each.weights}
    rank = min(max(each.rank for each in read.values()), MAX_RANK)
    return replace(
        config,
        max_adapters=len(read),
        max_adapter_rank=rank,
        adapter_targets=config.adapter_targets or tuple(sorted(targets)),
    ), read


def executor_with_adapters(
    model: Any,
    config: EngineConfig | None,
    executor_of: Callable[[object, EngineConfig | None], Made],
) -> Made:
    """Makes the executor of a model; plain LoRA of a ``PeftModel`` is moved to slots.

    What has no slots (other methods, layers outside the decoder, devices) stays in the layers.
    """
    given = PeftAdapters.of(model)
    base = unwrap(model)
    if given is None or not _can_have_adapters(base):
        return executor_of(base, config)
    sized, _ = with_adapters(config or EngineConfig(), given.adapters)
    try:
        return _in_slots(given, executor_of, sized)
    except AdapterError as error:
        _log.warning("the PeftModel's adapters stay in its layers: %s", error)
        return executor_of(base, config)


def _in_slots(
    given: PeftAdapters,
    executor_of: Callable[[object, EngineConfig | None], Made],
    config: EngineConfig,
) -> Made:
    with contextlib.ExitStack() as undo:
        undo.enter_context(given.removed())
        executor = executor_of(given.model, config)
        assert executor.adapters is not None
        try:
            executor.adapters.take(given, undo)
        except AdapterError:
            executor.close()
            raise
        return executor


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


class _Waiting(Protocol):
    adapter: ServedAdapter | None


class NamedAdapters:
    """Adds and removes LoRA adapters between steps, without a capture, while others are in use.

    Requests name theirs in `SamplingParams.adapter`. Tokens of requests with others, or without
    one, do not change. A slot is free if it has no name and no open request uses it, so nothing has
    to be released when a request ends. Those of a ``PeftModel`` are added at once: requests that
    name none use the one that was active there, until it is removed.

    Args:
        pool: of the executor; None: it has none.
        requests: the open ones, which changes.

    Attributes:
        waiting: requests that were accepted and are not open yet, which changes.
    """

    waiting: Collection[_Waiting] = ()

    def __init__(self, pool: AdapterPool | None, requests: Mapping[int, RequestState]) -> None:
        self._pool, self._requests = pool, requests
        self._by_name: dict[str, ServedAdapter] = {}
        given = None if pool is None else pool.given
        self._default = None if given is None else given.default
        for name, adapter in ({} if given is None else given.adapters).items():
            self.add(name, adapter)

    @property
    def names(self) -> list[str]:
        """Names of the adapters, in the order in which they were added."""
        return [*self._by_name]

    def figures(self) -> dict[str, Any]:
        """Returns the slots, their rank and bytes, and the open requests of each adapter."""
        pool = self._pool
        if pool is None:
            return {}
        slots = Counter(each.adapter for each in self._requests.values())
        requests = {name: slots[each.slot] for name, each in self._by_name.items()}
        sizes = {"slots": pool.slots - 1, "rank": pool.max_rank, "bytes": pool.nbytes}
        return {**sizes, "requests": requests}

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
        if not (isinstance(name, str) and name and name.isprintable()):
            raise ConfigError(
                f"expected a name for an adapter, got {quoted(name)}: pass a line of text"
            )
        pool = self._pool_for(name)
        if name in self._by_name:
            raise AdapterError(
                f"expected a new name for an adapter, got {name!r}: remove that one first"
            )
        adapter = source if isinstance(source, Adapter) else read_adapter(source)
        pool.check(adapter)
        used = {each.slot for each in self._by_name.values()}
        used |= {each.adapter.slot for each in self.waiting if each.adapter}
        used |= {each.adapter for each in self._requests.values()}
        used.discard(0)
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
        """Removes an adapter; requests that were accepted finish with it.

        Raises:
            ConfigError: there is no adapter of that name.
        """
        if name not in self._by_name:
            raise self._unknown(name)
        del self._by_name[name]

    def of(self, name: str | None) -> ServedAdapter:
        """Returns the adapter of a request; for no name the default, or else that of slot 0.

        Raises:
            ConfigError: there is no adapter of that name.
        """
        if name is None:
            return self._by_name.get(self._default or "", _NONE)
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
