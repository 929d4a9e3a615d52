"""A naive model of a block pool and of the memory it manages, which does everything twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from compiled_attn.cache.blocks import BlockPool, DuplicateRequest, OutOfBlocks, UnknownRequest
from tests.compiled_attn.cache.blocks.pools import perform_copies
from tests.compiled_attn.state import state_of

Payload = tuple[str | None, tuple[int, ...]]

NAMES = "abcdef"


@dataclass
class Row:
    """What the model knows of one request. ``tokens`` covers all reserved positions."""

    salt: str | None
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    length: int = 0
    computed: int = 0
    cached: int = 0
    withdrawn: bool = False

    def payload(self, position: int) -> Payload:
        return (self.salt, tuple(self.tokens[: position + 1]))


class ModelledPool:
    """Does everything twice, with the pool and with lists, and compares."""

    def __init__(self, num_blocks: int, size: int, least: int | None = None) -> None:
        partial = least is not None
        self.pool = BlockPool(num_blocks, size, partial_hits=partial, min_partial_tokens=least)
        self.size = size
        self.least = least
        self.total = num_blocks - 1
        self.rows: dict[str, Row] = {}
        self.idle: list[int] = []  # cached blocks, next to be evicted first
        self.index: dict[Payload, int] = {}  # payload of a full block's last slot -> block
        self.tails: dict[Payload, int] = {}  # payload of the last slot of a part -> block
        self.twins: dict[int, Payload] = {}  # blocks whose payload is found in another
        self.pending: dict[int, int] = {}  # destination -> source
        self.at = list(range(num_blocks))  # the place of each block
        self.cache: list[list[Payload | None]] = [[None] * size for _ in range(num_blocks)]
        self.withdrawn: set[Payload] = set()  # full blocks that were known before
        self.counts: Counter[str] = Counter()
        self.highest = self.peak = 0

    def references(self) -> Counter[int]:
        held = Counter(block for row in self.rows.values() for block in row.blocks)
        return held + Counter(self.pending.values())

    def room(self) -> int:
        return self.total - len(self.references())

    def free_blocks(self) -> list[int]:
        refs = self.references()
        free = [b for b in range(1, self.total + 1) if not refs[b] and b not in self.idle]
        return sorted(free, key=self.at.__getitem__)

    def known(self) -> set[int]:
        return {*self.index.values(), *self.tails.values()}

    def evict(self, block: int) -> None:
        self.counts["evictions"] += 1
        self.forget(block)

    def forget(self, block: int) -> None:
        """A twin is found from now on."""
        self.tails = {key: other for key, other in self.tails.items() if other != block}
        for key in [key for key, other in self.index.items() if other == block]:
            del self.index[key]
            heir = next((b for b, content in self.twins.items() if content == key), None)
            if heir is not None:
                self.index[key] = heir
                del self.twins[heir]
                self.counts["heirs"] += 1

    def take(self, count: int) -> list[int]:
        """The ids that the next allocations must return: lowest free place, then evicted."""
        free = self.free_blocks()[:count]
        evicted = [self.idle.pop(0) for _ in range(count - len(free))]
        for block in evicted:
            self.evict(block)
        for block in free + evicted:
            self.cache[self.at[block]] = [None] * self.size
        self.counts["allocations"] += count
        return free + evicted

    def writes_into_shared(self, row: Row) -> bool:
        if row.length % self.size == 0:
            return False
        return sum(row.blocks[-1] in other.blocks for other in self.rows.values()) > 1

    def can_take_over(self, row: Row) -> bool:
        refs = self.references()
        last = row.blocks[-1] if row.blocks else 0
        return last in self.pending and refs[last] == refs[self.pending[last]] == 1

    def needed(self, row: Row, length: int) -> int:
        if length <= row.length:
            return 0
        return -(-length // self.size) - len(row.blocks) + self.writes_into_shared(row)

    def hits(self, salt: str | None, tokens: list[int]) -> list[int]:
        blocks = []
        for end in range(self.size, len(tokens), self.size):
            block = self.index.get((salt, tuple(tokens[:end])))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def partial_hits(self, salt: str | None, tokens: list[int], start: int) -> tuple[int, set[int]]:
        """The most tokens from ``start`` on that a block begins with, and all such blocks."""
        best: dict[int, int] = {}
        for (other, content), block in [*self.index.items(), *self.tails.items()]:
            if (
                other == salt
                and start < len(content) <= start + self.size
                and content[:start] == tuple(tokens[:start])
            ):
                pairs = zip(content[start:], tokens[start:-1], strict=False)
                best[block] = [*(a == b for a, b in pairs), False].index(False)
        most = max(best.values(), default=0)
        return most, {block for block, count in best.items() if count == most}

    def let_go(self, blocks: list[int]) -> None:
        """What becomes of blocks that nobody holds any more, in the order they were given last."""
        refs = self.references()
        for block in reversed(dict.fromkeys(b for b in reversed(blocks) if not refs[b])):
            if block in self.known():
                self.idle.append(block)
            elif block in self.twins:
                found = self.index[self.twins.pop(block)]
                if found in self.idle:  # its content was used until now
                    self.idle.remove(found)
                    self.idle.append(found)
                    self.counts["touched"] += 1

    def grow(self, row: Row, length: int, token: int) -> list[int]:
        needed = self.needed(row, length)
        replaced = []
        if needed > 0 and self.writes_into_shared(row):
            old = row.blocks[-1]
            replaced = self.take(1)
            self.pending[replaced[0]] = self.pending.get(old, old)
            needed -= 1
            self.counts["copies"] += 1
        elif needed > self.room():
            replaced = [self.pending.pop(row.blocks[-1])]
            if replaced[0] in self.known():
                self.evict(replaced[0])
            self.counts["taken over"] += 1
        if replaced:
            row.blocks[-1] = replaced[0]
        fresh = self.take(needed)
        row.blocks += fresh
        row.length = max(row.length, length)
        row.tokens += [token] * (length - len(row.tokens))
        return replaced + fresh

    def drop(self, name: str) -> Row:
        row = self.rows.pop(name)
        blocks = list(row.blocks)
        # The pool lets go of block after block, from the last one on.
        ghost = self.rows[name] = Row(row.salt, [], blocks)
        while blocks:
            block = ghost.blocks.pop()
            if not self.references()[block]:
                source = self.pending.pop(block, None)
                self.let_go([block] if source is None else [source, block])
        del self.rows[name]
        return row

    def note_use(self) -> None:
        used = self.references()
        self.highest = max([self.highest, *(self.at[block] for block in used)])
        self.peak = max(self.peak, len(used))

    def add(self, name: str, tokens: list[int], salt: str | None) -> None:
        lengths = [len(tokens), len(tokens) + 1, self.total * self.size]
        fits = [self.pool.can_allocate(length, tokens, salt=salt) for length in lengths]
        row = Row(salt, list(tokens), self.hits(salt, tokens))
        self.idle = [block for block in self.idle if block not in row.blocks]
        row.length = len(row.blocks) * self.size
        self.rows[name] = row
        self.pool.add(name, np.array(tokens, dtype=np.int32), salt=salt)
        if self.least is not None:
            self.add_partial_hit(name, row)
        row.computed = row.cached = row.length
        self.counts["queried"] += len(tokens)
        self.counts["hits"] += row.cached
        assert [self.pool.can_reserve(name, length) for length in lengths] == fits
        self.note_use()

    def add_partial_hit(self, name: str, row: Row) -> None:
        """Of several blocks that are equally good the pool may choose."""
        count, sources = self.partial_hits(row.salt, row.tokens, row.length)
        held = self.references()
        has_room = [self.room() > (not held[source]) for source in sources]
        if count < self.least:
            return
        if self.pool.table(name).length == row.length:
            assert not all(has_room)
            self.counts["no room for a copy"] += 1
            return
        source = self.pool._blocks.copies.source(self.pool.table(name).blocks[-1])
        assert source in sources and self.room() > (not held[source])
        if source in self.idle:
            self.idle.remove(source)
        self.pending[(fresh := self.take_beside(source))] = source
        row.blocks.append(fresh)
        row.length += count
        self.counts["copies"] += 1
        self.counts["partial hits"] += count

    def take_beside(self, source: int) -> int:
        self.pending[-1] = source  # holds it
        fresh = self.take(1)[0]
        del self.pending[-1]
        return fresh

    def swap(self, limit: int, skipped: int) -> None:
        """One defragmentation: content first, then the places; a move where that is enough."""
        pairs = self.pool.places.compaction(limit)[skipped:]
        used = {self.at[block] for block in self.references()}
        assert all(a in used and b not in used and a > b > 0 for a, b in pairs)
        for a, b in pairs:
            if self.pool.places.is_worth_keeping(b):
                self.cache[a], self.cache[b] = self.cache[b], self.cache[a]
            else:
                self.cache[a], self.cache[b] = [None] * self.size, self.cache[a]
        self.commit_swap(pairs)

    def shuffle(self, pick: int) -> None:
        """Two places of any state."""
        a, b = pick % self.total + 1, pick // self.total % self.total + 1
        if a != b:
            self.cache[a], self.cache[b] = self.cache[b], self.cache[a]
            self.commit_swap([(a, b)])

    def commit_swap(self, pairs: list[tuple[int, int]]) -> None:
        self.pool.places.swap(pairs)
        for a, b in pairs:
            x, y = self.at.index(a), self.at.index(b)
            self.at[x], self.at[y] = b, a
            self.counts["moves"] += 1
        self.note_use()

    def ask_for_room(self, tokens: list[int], salt: str | None, length: int) -> None:
        hits = self.hits(salt, tokens)
        room = self.total - len(self.references().keys() | set(hits))
        expected = -(-length // self.size) - len(hits) <= room
        assert self.pool.can_allocate(length, tokens, salt=salt) == expected

    def reserve(self, name: str, length: int, token: int) -> None:
        row = self.rows[name]
        needed = self.needed(row, length)
        fits = needed <= self.room() + self.can_take_over(row)
        assert self.pool.can_reserve(name, length) == fits
        appends = length == row.length + 1
        call = (lambda: self.pool.append(name)) if appends else self.reserving(name, length)
        if fits:
            expected = self.grow(row, length, token)
            assert call() == expected
            self.note_use()
        else:
            self.counts["out of blocks"] += 1
            with pytest.raises(OutOfBlocks):
                call()

    def fill(self, name: str, token: int) -> None:
        """Reserve all that is left, to the last block."""
        row = self.rows[name]
        count = len(row.blocks) + self.room() + self.can_take_over(row)
        self.reserve(name, (count - self.writes_into_shared(row)) * self.size, token)

    def reserving(self, name: str, length: int) -> Callable[[], list[int]]:
        return lambda: self.pool.reserve(name, length)

    def copy(self, skipped: int = 0) -> None:
        """All copies but the first so many, which stay pending."""
        pairs = self.pool.pending_copies()
        assert pairs == [(source, destination) for destination, source in self.pending.items()]
        assert not {source for source, _ in pairs} & {destination for _, destination in pairs}
        for source, destination in pairs[skipped:]:
            self.cache[self.at[destination]] = list(self.cache[self.at[source]])
            del self.pending[destination]
        if skipped:
            self.pool.copied([*pairs[skipped:], *pairs[skipped:]])
            self.counts["copied in parts"] += len(pairs) > skipped
        else:
            assert perform_copies(self.pool) == pairs
        self.let_go([source for source, _ in pairs[skipped:]])

    def step(self, name: str, share: float) -> None:
        """One step of the engine for one request: copy, write K/V, commit."""
        row = self.rows[name]
        start, end = row.computed, row.computed + round(share * (row.length - row.computed))
        self.copy()
        for position in range(start, end):
            place = self.at[row.blocks[position // self.size]]
            self.cache[place][position % self.size] = row.payload(position)
        row.computed = end
        self.pool.commit(name, row.tokens, end)
        if not row.withdrawn:
            self.note(row, start, end)

    def withdraw(self, name: str) -> None:
        row = self.rows[name]
        self.pool.withdraw(name)
        row.withdrawn = True
        for block in row.blocks:
            self.withdrawn |= {key for key, other in self.index.items() if other == block}
            self.forget(block)
            if block in self.twins:
                self.withdrawn.add(self.twins.pop(block))
            self.counts["withdrawn"] += 1

    def note(self, row: Row, start: int, end: int) -> None:
        for number in range(start // self.size, end // self.size):
            self.note_full(row.payload((number + 1) * self.size - 1), row.blocks[number])
        if self.least is not None:
            filled, full = end % self.size, end - end % self.size
            if filled // self.least > max(0, start - full) // self.least:
                self.note_tail(row.payload(end - 1), row.blocks[end // self.size])

    def note_full(self, key: Payload, block: int) -> None:
        self.tails = {other: b for other, b in self.tails.items() if b != block}
        if block in self.index.values() or block in self.twins:
            return
        if key in self.index:
            self.twins[block] = key
        else:
            self.index[key] = block

    def note_tail(self, key: Payload, block: int) -> None:
        if block in self.index.values() or block in self.twins:
            return
        known = [k for k, b in self.tails.items() if b == block]
        if known and known[0][1][: len(key[1])] == key[1]:
            return
        self.tails = {other: b for other, b in self.tails.items() if b != block}
        self.tails.setdefault(key, block)

    def fork(self, parent: str, child: str) -> None:
        row = self.rows[parent]
        tokens = row.tokens[: row.length]
        length, computed, withdrawn = row.length, row.computed, row.withdrawn
        blocks = list(row.blocks)
        self.rows[child] = Row(row.salt, tokens, blocks, length, computed, withdrawn=withdrawn)
        self.pool.fork(parent, child)

    def free(self, name: str, preempt: bool) -> Row:
        row = self.drop(name)
        self.counts["preemptions"] += preempt
        if preempt:
            self.pool.preempt(name)
        else:
            self.pool.free(name)
        return row

    def misuse(self, name: str) -> None:
        """Calls that must fail and change nothing."""
        row, places = self.rows[name], self.pool.places
        before = state_of(self.pool)
        for wrong in (
            lambda: self.pool.add(name, row.tokens),
            lambda: self.pool.fork(name, name),
            lambda: self.pool.fork("unknown", "new"),
            lambda: self.pool.reserve("unknown", 1),
            lambda: self.pool.reserve(name, -1),
            lambda: self.pool.reserve(name, (self.total + 1) * self.size),
            lambda: self.pool.commit("unknown", [], 0),
            lambda: self.pool.commit(name, row.tokens, row.length + 1),
            lambda: self.pool.commit(name, row.tokens, row.computed - 1),
            lambda: self.pool.withdraw("unknown"),
            lambda: self.pool.free("unknown"),
            lambda: self.pool.preempt("unknown"),
            lambda: places.swap([(1, self.total), (self.total, 1)]),
            lambda: places.swap([(0, self.total)]),
            lambda: places.resolve(-1),
        ):
            with pytest.raises((UnknownRequest, DuplicateRequest, OutOfBlocks, ValueError)):
                wrong()
        assert state_of(self.pool) == before
