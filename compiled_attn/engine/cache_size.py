"""The size of an engine's KV cache: as configured, or computed from model and machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from compiled_attn.cache.blocks.window import most_held
from compiled_attn.cache.kv_cache import PagedKVCache
from compiled_attn.engine.config import ConfigError, EngineConfig
from compiled_attn.models.adapters import bytes_of_slots
from compiled_attn.models.packed import weight_bytes
from compiled_attn.ops.packed_linear import BITS_OF
from graphs.capture.memory import free_bytes, machine_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["CacheSize", "StateSize", "memory_for"]

_LEAST_BYTES = 256 * 2**20
_TIMES_WEIGHTS = 4


@dataclass(frozen=True, slots=True)
class StateSize:
    """The slots for recurrent states: one for each running request, the others for snapshots.

    Args:
        running: requests that run at the same time at most.
        snapshots: snapshots that are stored at most.
        snapshot_every: blocks between two snapshots of a prompt.
        bytes_per_slot: bytes of the states of one request.
    """

    running: int
    snapshots: int
    snapshot_every: int
    bytes_per_slot: int

    @property
    def slots(self) -> int:
        """Slots of the cache, null slot included."""
        return 1 + self.running + self.snapshots

    @property
    def bytes(self) -> int:
        """Bytes of all slots."""
        return self.slots * self.bytes_per_slot

    @staticmethod
    def of(model: nn.Module, config: EngineConfig, bytes_per_slot: int, step: int) -> StateSize:
        """Returns the size as configured, or a default.

        The default is `max_seqs` snapshots, but not so many that all slots take more than half of
        the memory for the cache.

        Args:
            bytes_per_slot: bytes of the states of one request (> 0).
            step: tokens of a step at most.

        Raises:
            ConfigError: the machine has less memory.
        """
        running, given = config.max_seqs, config.state_bytes
        if given is not None:
            snapshots = given // bytes_per_slot
        else:
            budget = config.kv_bytes
            if budget is None:
                free = free_bytes(_device_of(model))
                budget = None if free is None else _half(free)
            most = running if budget is None else budget // 2 // bytes_per_slot - 1 - running
            snapshots = max(0, min(running, most))
        every = config.snapshot_every or max(1, step // config.block_size)
        size = StateSize(running, snapshots, every, bytes_per_slot)
        available = memory_for(model)
        if available is not None and size.bytes > available:
            raise ConfigError(
                f"a state that does not fit: expected at most {available:,} bytes, which this "
                f"machine has, got {size.bytes:,} bytes for {size.slots} slots of "
                f"{bytes_per_slot:,} bytes: lower max_seqs (--max-seqs) or "
                "state_memory (--state-memory)"
            )
        return size


@dataclass(frozen=True, slots=True)
class CacheSize:
    """The size of a KV cache in bytes (with scales, and the cache of the draft model), blocks (null
    block included) and tokens, and what determined it.

    ``near_blocks``: blocks of the windowed layers (null block included), if they have their own.
    """

    dtype: str
    bytes: int
    blocks: int
    tokens: int
    why: str
    near_blocks: int = 0

    @staticmethod
    def of(
        model: PreTrainedModel,
        config: EngineConfig,
        context: int,
        ranks: int = 1,
        slot: PagedKVCache | None = None,
        step: int | None = None,
        draft: PreTrainedModel | None = None,
        most_near: int | None = None,
        states: StateSize | None = None,
    ) -> CacheSize:
        """Returns the size as configured, or a default.

        The default is four times the weights, but at least 256 MiB; at most half of the free
        memory, and at most what `max_seqs` requests of full context fill; one such request always
        fits. Half of the free memory is rounded down to a power of two, so that it is the same at
        the next start: captured graphs depend on the size of the cache. What the slots of adapters
        will take is not free. On an accelerator, which nothing else uses, it is four fifths of the
        free memory, in 64ths of the total.

        Args:
            ranks: ranks that divide a context; the size is that of one rank.
            slot: a cache of the model, with near layers if they get blocks of their own; None:
                makes one, without.
            step: tokens of a step at most, which a request holds beyond a sliding window; None: as
                many as the context.
            draft: the draft model, whose cache has the blocks of all ranks; None: there is none.
            most_near: near blocks at most; None: as many as all requests need.
            states: slots for recurrent states, which share the memory; None: there are none.

        Raises:
            ConfigError: it is too small for a block, or too large for the machine.
        """
        from compiled_attn.models.hf import cache_for  # loads transformers

        if slot is None:
            slot = cache_for(model, 2, 1, dtype=config.cache_dtype, latents=not config.same_bits)
        size, step = config.block_size, step or context
        window = slot.window if ranks == 1 else None
        context = -(-context // ranks)
        request = most_held(context, window, step, size)
        share = _Share(
            slot.bytes_per_block // slot.block_size * size,
            request,
            state_bytes=0 if states is None else states.bytes,
        )
        if draft is not None:
            own = cache_for(draft, 2, 1, dtype=config.cache_dtype)
            if own.states is not None:
                raise ConfigError(
                    f"expected a draft model whose tokens can be rolled back, got a "
                    f"{type(draft).__name__}, which has recurrent states: take another one"
                )
            added = ranks * (own.bytes_per_block // own.block_size) * size
            share = replace(share, block_bytes=share.block_bytes + added)
        if slot.near is not None:
            last = most_held(context, slot.near.window, 1 + config.longest_draft, size)
            needed = 2 + 2 * config.max_seqs * last + -(-step // size)
            share = replace(
                share,
                near_bytes=slot.near_bytes_per_block // slot.block_size * size,
                least_near=2 + most_held(context, slot.near.window, step, size),
                most_near=needed if most_near is None else min(needed, most_near),
            )
        blocks, near, why = _blocks(model, config, share)
        total = blocks * share.block_bytes + near * share.near_bytes
        _refuse_beyond_memory(model, config, blocks, total + share.state_bytes)
        name = str(slot.dtype).removeprefix("torch.")
        return CacheSize(name, total, blocks, (blocks - 1) * size, why, near)


def memory_for(model: nn.Module) -> int | None:
    """Returns the bytes of memory of the model's device; None if unknown."""
    return machine_bytes(_device_of(model))


@dataclass(frozen=True, slots=True)
class _Share:
    """How memory is shared by blocks and near blocks, those of windowed layers.

    A block in use needs at most one near block, so there are never more of them. There are as many
    as all requests of a step need, and again for as many cached prefixes, or fewer if a request of
    full context does not fit otherwise.

    Args:
        request: blocks of a request of full context, at most at a time.
        least_near, most_near: near blocks (null block included) of one request, and of all.
        state_bytes: bytes of the slots for recurrent states.
    """

    block_bytes: int
    request: int
    near_bytes: int = 0
    least_near: int = 0
    most_near: int = 0
    state_bytes: int = 0

    def near(self, blocks: int) -> int:
        """Returns the near blocks for a number of blocks without a limit of memory."""
        return min(blocks, self.most_near)

    def within(self, given: int) -> tuple[int, int]:
        """Returns the blocks and the near blocks, null blocks included, that bytes are for."""
        given = max(0, given - self.state_bytes)
        near = self.near(given // (self.block_bytes + self.near_bytes))
        blocks = (given - near * self.near_bytes) // self.block_bytes
        whole = (1 + self.request) * self.block_bytes
        if blocks <= self.request and given >= whole + self.least_near * self.near_bytes:
            near = (given - whole) // self.near_bytes
            blocks = (given - near * self.near_bytes) // self.block_bytes
        return blocks, near


def _blocks(model: PreTrainedModel, config: EngineConfig, share: _Share) -> tuple[int, int, str]:
    if config.num_blocks is not None:
        return config.num_blocks, share.near(config.num_blocks), "num_blocks"
    most, least = config.max_seqs * share.request, share.request
    if not share.block_bytes:  # all layers have states instead
        return 1 + most, 0, "max_seqs requests of full context"
    if config.kv_bytes is not None:
        return *_blocks_within(config.kv_bytes, share, config), "kv_memory"
    budgets = _budgets(model, config, share.state_bytes)
    limits = [(*share.within(budget), why) for budget, why in budgets]
    limits.append((most, share.near(1 + most), "max_seqs requests of full context"))
    one = least, min(1 + least, share.least_near), "one request of full context"
    blocks, near, why = max(one, min(limits))
    return 1 + blocks, near, why


def _blocks_within(given: int, share: _Share, config: EngineConfig) -> tuple[int, int]:
    blocks, near = share.within(given)
    least = 2 * (share.block_bytes + share.near_bytes) + share.state_bytes
    if given < least:
        states = f"{share.state_bytes:,} of them for states, " if share.state_bytes else ""
        lower = "block_size, max_seqs or state_memory" if states else "block_size"
        raise ConfigError(
            f"expected kv_memory of at least {least:,} bytes, {states}two blocks of "
            f"{config.block_size} tokens of which one is the null block, got {given:,}: raise "
            f"kv_memory (--kv-memory) or lower {lower}"
        )
    return blocks, near


def _budgets(
    model: nn.Module, config: EngineConfig, state_bytes: int = 0
) -> Iterator[tuple[int, str]]:
    device = _device_of(model)
    free, total = free_bytes(device), machine_bytes(device)
    if free is not None:
        free = max(0, free - _adapter_bytes(model, config))
    amount = "" if free is None else f"of {free / 2**30:.1f} GiB free"
    if device.type != "cpu" and free is not None and total is not None:
        part = max(1, total // 64)
        yield free * 4 // 5 // part * part, f"four fifths {amount} on {device}, in 64ths of all"
        return
    weights = weight_bytes(model, BITS_OF.get(config.weights))
    least = _LEAST_BYTES, "256 MiB, the least"
    enough, why = max(least, (_TIMES_WEIGHTS * weights, f"{_TIMES_WEIGHTS} times the weights"))
    yield enough + state_bytes, why
    if free is not None:
        yield _half(free), f"half {amount}, as a power of two"


def _half(free: int) -> int:
    return 1 << max(free // 2, 1).bit_length() - 1


def _refuse_beyond_memory(
    model: PreTrainedModel, config: EngineConfig, blocks: int, needed: int
) -> None:
    """Checks before the allocation, as the system would promise more memory than there is."""
    available = memory_for(model)
    if available is None:
        return
    available = max(0, available - _adapter_bytes(model, config))
    if needed > available:
        raise ConfigError(
            f"not enough memory: expected a KV cache of at most {available:,} bytes, which this "
            f"machine has, got {needed:,} bytes for {blocks} blocks of {config.block_size} "
            "tokens: lower num_blocks (--num-blocks), kv_memory (--kv-memory), block_size or the "
            "context"
        )


def _adapter_bytes(model: nn.Module, config: EngineConfig) -> int:
    itemsize = next(model.parameters()).element_size()
    rank, targets = config.max_adapter_rank, config.adapter_targets
    return bytes_of_slots(model, config.max_adapters, rank, targets, itemsize)


def _device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
