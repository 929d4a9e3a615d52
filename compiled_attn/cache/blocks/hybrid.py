"""A pool for models with recurrent states: each request has a slot for its states."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from compiled_attn.arguments import whole
from compiled_attn.cache.blocks.pool import BlockPool
from compiled_attn.cache.blocks.prefix import PromptKeys, Salt, Tokens
from compiled_attn.cache.blocks.table import BlockTable

__all__ = ["HybridPool", "StatePool"]


class StatePool:
    """Assigns slots of a `StateCache` to requests, and to snapshots of states of prefixes.

    A snapshot is found by the key of the block that ends its prefix. If there is no room for one
    more, the least recently used one is evicted; one that a pending copy reads or writes is pinned.
    The caller performs the copies of `pending`, in order, before the next step writes states, and
    then calls `copied`.

    Args:
        running: requests that may have a slot at the same time.
        snapshots: snapshots that are stored at most; 0: none.

    Attributes:
        num_slots: slots, null slot 0 included.
        positions: ``[num_slots]`` int64, tokens that the states in each slot are for, once the
            pending copies were performed; 0: none.
        counts: saved, restored and evicted snapshots.
    """

    def __init__(self, running: int, snapshots: int = 0) -> None:
        self.max_running = whole("running", running, 1)
        self.max_snapshots = whole("snapshots", snapshots, 0)
        self.num_slots = 1 + self.max_running + self.max_snapshots
        self.positions = np.zeros(self.num_slots, np.int64)
        self.counts = Counter(saved=0, restored=0, evicted=0)
        self._free: list[int] = [*range(self.num_slots - 1, 0, -1)]
        self._slot_of: dict[Hashable, int] = {}
        self._snapshots: OrderedDict[bytes, int] = OrderedDict()
        self._withdrawn: set[int] = set()  # slots of snapshots that only pending copies use
        self._saves: list[tuple[int, int]] = []
        self._restores: dict[int, int] = {}  # source of each slot of a request
        self._pins = Counter[int]()

    @property
    def has_free(self) -> bool:
        """Whether one more request can have a slot."""
        return len(self._slot_of) < self.max_running

    @property
    def free(self) -> tuple[int, ...]:
        """Slots that hold neither states of a request nor a snapshot."""
        return (*self._free,)

    @property
    def num_snapshots(self) -> int:
        """Number of snapshots that can be found."""
        return len(self._snapshots)

    def slot(self, request_id: Hashable) -> int:
        """Returns the slot of a request; ``KeyError`` if it has none."""
        return self._slot_of[request_id]

    def __contains__(self, key: bytes) -> bool:
        return key in self._snapshots

    def take(self, request_id: Hashable, key: bytes | None = None) -> int:
        """Assigns a free slot to a request without one; there must be one, see `has_free`.

        ``key``: of the snapshot that it continues from, whose copy becomes pending; None: it has no
        tokens yet.
        """
        self._slot_of[request_id] = slot = self._free.pop()
        self.positions[slot] = 0
        if key is not None:
            source = self._snapshots[key]
            self._snapshots.move_to_end(key)
            self._restores[slot] = source
            self._pins[source] += 1
            self.positions[slot] = self.positions[source]
        return slot

    def release(self, request_id: Hashable) -> None:
        """Frees the slot of a request. Pending copies from it remain, those to it do not."""
        slot = self._slot_of.pop(request_id)
        if (source := self._restores.pop(slot, None)) is not None:
            self._unpin(source)
        self._free.append(slot)

    def save(self, request_id: Hashable, key: bytes) -> bool:
        """Makes a copy of a request's states pending, as the snapshot of a key.

        Returns:
            Whether there is one now: not if the slots of all others are pinned.
        """
        if key in self._snapshots:
            self._snapshots.move_to_end(key)
            return True
        if len(self._snapshots) + len(self._withdrawn) >= self.max_snapshots:
            unused = (each for each, slot in self._snapshots.items() if not self._pins[slot])
            if (oldest := next(unused, None)) is None:
                return False
            self.withdraw(oldest)
            self.counts["evicted"] += 1
        source = self._slot_of[request_id]
        self._snapshots[key] = slot = self._free.pop()
        self._saves.append((source, slot))
        self._pins[slot] += 1
        self.positions[slot] = self.positions[source]
        return True

    def withdraw(self, key: bytes) -> None:
        """Removes a snapshot, if there is one of this key."""
        if (slot := self._snapshots.pop(key, None)) is None:
            return
        if self._pins[slot]:
            self._withdrawn.add(slot)
        else:
            self._free.append(slot)

    def pending(self) -> list[tuple[int, int]]:
        """Returns the ``(source, destination)`` copies to perform one after another.

        Snapshots are saved first: a request may continue from one that is not saved yet, in a slot
        of which another one is saved.
        """
        return [*self._saves, *((source, slot) for slot, source in self._restores.items())]

    def copied(self) -> None:
        """Reports that all copies of `pending` were performed."""
        self.counts.update(saved=len(self._saves), restored=len(self._restores))
        used = [*(slot for _, slot in self._saves), *self._restores.values()]
        self._saves, self._restores = [], {}
        for slot in used:
            self._unpin(slot)

    def advance(
        self,
        request_ids: Iterable[Hashable],
        slots: Sequence[int] | NDArray[np.int64],
        starts: Sequence[int],
        counts: Sequence[int],
    ) -> None:
        """Notes that a step computes tokens ``starts .. starts + counts`` of requests in slots.

        Raises:
            RuntimeError: the slot is not that of the request, its states are for another number of
                tokens, or copies are pending.
        """
        expected = np.array([self._slot_of.get(each, 0) for each in request_ids], np.int64)
        at, before = np.asarray(slots, np.int64), np.asarray(starts, np.int64)
        if self._saves or self._restores:
            raise RuntimeError(f"expected all states to be copied, got {self.pending()} pending")
        wrong = (expected != at) | (at == 0) | (self.positions[expected] != before)
        if wrong.any():
            row = int(wrong.argmax())
            raise RuntimeError(
                f"expected row {row} to continue from {before[row]} tokens in slot {at[row]}, got "
                f"states for {self.positions[expected[row]]} in slot {expected[row]}"
            )
        self.positions[at] = before + np.asarray(counts, np.int64)

    def _unpin(self, slot: int) -> None:
        self._pins[slot] -= 1
        if not self._pins[slot]:
            del self._pins[slot]
            if slot in self._withdrawn:
                self._withdrawn.remove(slot)
                self._free.append(slot)


class HybridPool(BlockPool):
    """A `BlockPool` whose requests have a slot for recurrent states.

    A prefix is found up to the last block after which there is a snapshot, from which the request
    continues. Snapshots are made at borders, every ``snapshot_every`` blocks: `chunk_end` ends a
    chunk there, and `commit` saves the states. Forks are refused.

    Args:
        num_blocks, block_size, key: see `BlockPool`.
        running, snapshots: see `StatePool`.
        snapshot_every: blocks between two borders.

    Attributes:
        states: the slots.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        running: int,
        snapshots: int,
        snapshot_every: int,
        key: bytes | None = None,
    ) -> None:
        super().__init__(num_blocks, block_size, key=key)
        self.states = StatePool(running, snapshots)
        self._border = whole("snapshot_every", snapshot_every, 1) * self.block_size
        self._saved: dict[Hashable, int] = {}  # tokens of the last snapshot of each request

    def add(
        self, request_id: Hashable, tokens: Tokens | PromptKeys | None = None, *, salt: Salt = None
    ) -> BlockTable:
        """See `BlockPool.add`.

        Raises:
            RuntimeError: no slot is free, see `can_allocate`.
        """
        if request_id not in self and not self.states.has_free:
            raise RuntimeError(
                f"expected a free slot for the states of request {request_id!r}, got "
                f"{self.states.max_running} requests that have all of them: call can_allocate"
            )
        table = super().add(request_id, tokens, salt=salt)
        self._saved[request_id] = table.num_cached_tokens
        self.states.take(request_id, table._key if table.num_cached_tokens else None)
        return table

    def can_allocate(
        self,
        length: int,
        tokens: Tokens | PromptKeys | None = None,
        *,
        salt: Salt = None,
        at_once: int | None = None,
    ) -> bool:
        """See `BlockPool.can_allocate`; a slot must be free too."""
        return self.states.has_free and super().can_allocate(
            length, tokens, salt=salt, at_once=at_once
        )

    def chunk_end(self, start: int, end: int, *, is_last: bool) -> int:
        """Returns where a chunk of a prompt that may end at ``end`` does: at the next border.

        If that is near, so that the chunk would be short, it is passed: the chunk then ends at the
        following one at most, and after a whole block unless it is the last one of its prompt.
        """
        border = (start // self._border + 1) * self._border
        if not self.states.max_snapshots or end <= border:
            return end
        if 2 * (border - start) >= min(self._border, end - start):
            return border
        if is_last and end <= border + self._border:
            return end
        end = min(end, border + self._border)
        return max(border, end - end % self.block_size)

    def commit(self, request_id: Hashable, tokens: Tokens, length: int) -> int:
        """See `BlockPool.commit`; saves the states at the first whole block after a border.

        Raises:
            RuntimeError: the states are for another number of tokens.
        """
        following = super().commit(request_id, tokens, length)
        table, border = self._tables[request_id], self._border
        is_whole = table._key is not None and table._num_keyed * self.block_size == length
        if not is_whole or length // border <= self._saved[request_id] // border:
            return following
        if (found := self.states.positions[self.states.slot(request_id)]) != length:
            raise RuntimeError(
                f"expected the states of request {request_id!r} for {length} tokens, got those for "
                f"{found}: call advance with each step"
            )
        self._saved[request_id] = length
        assert table._key is not None
        self.states.save(request_id, table._key)
        return following

    def withdraw(self, request_id: Hashable, first: int = 0) -> None:
        """See `BlockPool.withdraw`; snapshots after these blocks are removed."""
        keys = [self._index.key(block) for block in self.table(request_id).blocks[first:]]
        super().withdraw(request_id, first)
        for key in keys:
            if key is not None:
                self.states.withdraw(key)

    def free(self, request_id: Hashable) -> None:
        """See `BlockPool.free`."""
        super().free(request_id)
        del self._saved[request_id]
        self.states.release(request_id)

    def fork(self, parent_id: Hashable, child_id: Hashable) -> NoReturn:
        """Raises RuntimeError: a fork would need a copy of the states at once."""
        raise RuntimeError(
            f"expected requests that are not forked, got a fork of {parent_id!r}: their states are "
            "shared at snapshots only"
        )

    def _match(self, prompt: PromptKeys) -> tuple[list[int], bytes]:
        blocks, _ = super()._match(prompt)
        found = range(len(blocks), 0, -1)
        end = next((count for count in found if prompt.after(count) in self.states), 0)
        return blocks[:end], prompt.after(end)
