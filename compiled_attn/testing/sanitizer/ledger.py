"""The host's record of a cache: tokens of requests, writers of slots, and freed blocks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compiled_attn.cache.slot_shadow import FINE, NOT_CALLED, ExpectedStep, SlotShadow
from compiled_attn.testing.sanitizer.corrupt import CorruptCache
from compiled_attn.testing.sanitizer.lineage import Lineage

__all__ = ["Ledger", "NearTags", "StepTokens", "poison"]

_REMEMBERED = 512  # requests whose tokens messages can name
_STALE = ("token id", "position", "length", "number of new tokens", "set of visible tokens")


class StepTokens(NamedTuple):
    """What one request computes in a step.

    Args:
        request: unique id of the request.
        tokens: its token ids from position 0 on, at least ``start + count``.
        start, count: first position that the step computes, and number of positions; earlier ones
            are in the cache.
        blocks: its block table, in order of position.
        salt: requests with equal tokens and salts may share blocks.
        first: position before which no block is read; those blocks may be null.
    """

    request: Hashable
    tokens: Sequence[int]
    start: int
    count: int  # type: ignore[assignment]  # not the method of a tuple
    blocks: Sequence[int] | NDArray[np.integer[Any]]
    salt: object = None
    first: int = 0


class NearTags(NamedTuple):
    """Tags of layers with blocks of their own, see `compiled_attn.cache.kv_cache.NearLayers`.

    Args:
        layers: their numbers.
        tags: their tags, ``[near blocks, block_size]`` each.
        near_of: ``[num_blocks]`` int32, the near block of each block; 0: none.
    """

    layers: tuple[int, ...]
    tags: Sequence[Tensor]
    near_of: NDArray[np.int32]

    def slot(self, slot: int, size: int) -> int:
        """Returns the slot of the cache that a near slot stands for; in the null block: none."""
        block = int(np.argmax(self.near_of == slot // size)) if slot >= size else 0
        return block * size + slot % size


class Ledger:
    """Fills a shadow before each step, and raises its errors after the step.

    Args:
        shadow: the shadow of the cache.
        tags: returns the tags of each layer that has its own buffers.
        num_blocks: blocks of the cache, null block included.
        is_free: returns whether a block is free now.
        calls: error records per layer: 2 if writes and reads are separate calls.
        near: returns the tags of layers with blocks of their own, which ``tags`` leaves out.

    Attributes:
        step: number of the current step, which the caller counts.
    """

    def __init__(
        self,
        shadow: SlotShadow,
        tags: Callable[[], Sequence[Tensor]],
        num_blocks: int,
        is_free: Callable[[int], bool],
        calls: int = 1,
        near: Callable[[], NearTags | None] = lambda: None,
    ) -> None:
        self.step, self._near = 0, near
        self._shadow, self._tags, self._is_free, self._calls = shadow, tags, is_free, calls
        self._lineages: dict[Hashable, Lineage] = {}
        self._rows: dict[Hashable, list[int]] = {}  # row of the shadow, positions that are there
        self._parts: Sequence[StepTokens] = ()
        self._freed = np.zeros(num_blocks, np.int64)
        self._has_begun = False

    def freed(self, blocks: NDArray[np.integer[Any]], after: int) -> None:
        """Forgets what blocks hold, which were freed after a step."""
        for tags, of in self._groups():
            at = torch.from_numpy(of[blocks])
            tags.index_fill_(0, at.to(tags.device), 0)
        self._freed[blocks] = after

    def _groups(self) -> Iterator[tuple[Tensor, NDArray[np.int64]]]:
        """Yields the tags of each layer, and its block for each block of the cache."""
        near = self._near()
        yield from ((tags, np.arange(len(self._freed))) for tags in self._tags())
        if near is not None:
            yield from ((tags, near.near_of.astype(np.int64)) for tags in near.tags)

    def begin(self, parts: Sequence[StepTokens], logits: int = 0) -> None:
        """Says what step `step` computes, of which ``logits`` rows need logits.

        Raises:
            CorruptCache: two tokens of the step have one slot.
        """
        self._parts = parts
        if not self._has_begun:
            self._has_begun = True
            self._shadow.reset()  # a warmup without requests left its errors
        size = self._shadow.block_size
        self._slots = np.array([slot for part in parts for slot in _slots(part, size)], np.int64)
        self._refuse_two_writers()
        rows = self._rows_of(parts)
        ids, positions, tags, request = [], [], [], []  # type: ignore[var-annotated]
        sums: list[NDArray[np.int64]] = []
        at_rows, at_positions, at_tags = [], [], []  # type: ignore[var-annotated]
        for number, (part, row) in enumerate(zip(parts, rows, strict=True)):
            start, end = part.start, part.start + part.count
            lineage = self._lineage(part, row)
            refused = lineage.cut(start)
            lineage.extend(part.tokens, end)
            if len(refused):  # of a draft
                row[1] = min(row[1], start)
                self._forget(part, refused, lineage)
            ids.extend(part.tokens[start:end])
            positions.extend(range(start, end))
            tags.extend(lineage.tags[start:end])
            request.extend([number] * part.count)
            sums.append(lineage.sums(start, end, part.first))
            lineage.steps[start:end] = type(lineage.steps)("i", [self.step]) * part.count
            known, row[1] = row[1], max(row[1], end)
            at_rows.extend([row[0]] * (row[1] - known))
            at_positions.extend(range(known, row[1]))
            at_tags.extend(lineage.tags[known : row[1]])
        listed = (
            [row[0] for row in rows],
            [part.start + part.count for part in parts],
            [part.count for part in parts],
            ids, positions, tags, request, at_rows, at_positions, at_tags,
        )  # fmt: skip
        arrays = [np.array(each, np.int64) for each in listed]
        slots, total = self._slots, np.concatenate(sums)
        expected = ExpectedStep._make([*arrays[:6], slots, total, *arrays[6:]])
        self._shadow.fill(expected, logits)

    def check(self, *, used: bool = False, written: bool = False) -> None:
        """Raises CorruptCache if the step found an error.

        ``used``: the step is over and used every layer; ``written``: it is over, and if it read a
        layer, it read all that it wrote.
        """
        errors = self._shadow.errors().numpy()
        step, layers = errors[-1, :5], errors[:-1]
        if (step == FINE).all() and (layers[:, [0, 3]] == FINE).all():
            called = errors[: self._shadow.layers, 1] != NOT_CALLED
            if used or written:
                reads = called[self._calls - 1 :: self._calls]
                self._refuse_unread(reads, called[:: self._calls] | used)
            return
        self._shadow.reset()
        if (step[:4] != FINE).any():
            self._explain_step(step)
        near, size = self._near(), self._shadow.block_size
        for layer, error in enumerate(layers):
            number = min(layer, self._shadow.layers - 1) // self._calls
            if near is not None and number in near.layers:
                error[1] = near.slot(int(error[1]), size)
                error[4] = near.slot(int(error[4]) * size, size) // size
            if error[0] != FINE:
                self._explain_write(number, *map(int, error[:3]))
            if error[3] != FINE:
                self._explain_read(number, *map(int, error[4:8]))
        self._reread()
        self._explain_step(step)

    def _refuse_unread(self, reads: NDArray[np.bool_], expected: NDArray[np.bool_]) -> None:
        unread = np.flatnonzero(expected & ~reads)
        if len(unread) and reads.any():
            self._shadow.reset()
            self.raise_for(
                "wrong_layer",
                "does not read the layer, but only other ones",
                request=self._parts[0].request,
                layer=int(unread[0]),
            )

    def raise_for(self, kind: str, did: str, **places: Any) -> NoReturn:
        """Raises CorruptCache for what the host has found by itself."""
        raise CorruptCache(kind, self.step, did, **places)

    def _lineage(self, part: StepTokens, row: list[int]) -> Lineage:
        found = self._lineages.pop(part.request, None)
        if found is None or part.start == 0:
            found, row[1] = Lineage(part.request, part.salt), 0
        self._lineages[part.request] = found
        if len(self._lineages) > _REMEMBERED + len(self._parts):
            del self._lineages[next(iter(self._lineages))]
        return found

    def _forget(self, part: StepTokens, refused: NDArray[np.int64], lineage: Lineage) -> None:
        """Clears the tags of refused tokens, which later steps overwrite with others."""
        size, start = self._shadow.block_size, part.start
        end = min(start + len(refused), len(part.blocks) * size)
        refused, now = refused[: end - start], lineage.span(start, end)
        is_gone = np.ones(len(refused), np.bool_)
        is_gone[: len(now)] = now != refused[: len(now)]
        position = start + np.flatnonzero(is_gone)
        blocks, old = np.asarray(part.blocks, np.int64)[position // size], refused[is_gone]
        for tags, of in self._groups():
            at = torch.from_numpy(of[blocks] * size + position % size)
            flat, there = tags.view(-1), at.to(tags.device)
            found = flat[there]
            flat[there] = torch.where(found == torch.from_numpy(old).to(found), 0, found)

    def _rows_of(self, parts: Sequence[StepTokens]) -> list[list[int]]:
        rows, now = self._rows, {part.request for part in parts}
        if len(now) < len(parts) or len(parts) > self._shadow.requests:
            raise ValueError(
                f"expected at most {self._shadow.requests} requests in a step, each once, got "
                f"{[part.request for part in parts]}: make the sanitizer for larger steps"
            )
        if len(rows.keys() | now) > self._shadow.requests:
            for gone in rows.keys() - now:
                del rows[gone]
        if missing := [part.request for part in parts if part.request not in rows]:
            taken = {row for row, _ in rows.values()}
            free = (row for row in range(self._shadow.requests) if row not in taken)
            rows.update({name: [next(free), 0] for name in missing})
        return [rows[part.request] for part in parts]

    def _refuse_two_writers(self) -> None:
        order = np.argsort(self._slots, kind="stable")
        twice = np.flatnonzero(np.diff(self._slots[order]) == 0)
        if len(twice):
            first, second = (self._token(int(order[twice[0] + n])) for n in (0, 1))
            slot = int(self._slots[order[twice[0]]])
            self.raise_for(
                "two_writers",
                f"writes the slot of position {first[1]} of request {first[0].request!r}",
                **self._location(slot, second[1], second[0].request),
            )

    def _token(self, index: int) -> tuple[StepTokens, int]:
        """Returns the request and the position of a token of the step."""
        for part in self._parts:
            if index < part.count:
                return part, part.start + index
            index -= part.count
        raise IndexError(index)

    def _location(self, slot: int, position: int | None, request: Hashable) -> dict[str, Any]:
        block = slot // self._shadow.block_size
        return {"slot": slot, "block": block, "position": position, "request": request}

    def _explain_step(self, error: NDArray[np.int64]) -> NoReturn:
        field = int(np.flatnonzero(error != FINE)[0])
        index, location = int(error[field]), {}
        if field in (2, 3):
            if index < len(self._parts):
                location = {"request": self._parts[index].request}
        elif index < len(self._slots):
            part, position = self._token(index)
            location = {"request": part.request, "position": position}
        self.raise_for("stale_table", f"is computed with a wrong {_STALE[field]}", **location)

    def _explain_write(self, layer: int, token: int, slot: int, before: int) -> NoReturn:
        block, size = slot // self._shadow.block_size, self._shadow.block_size
        if token >= len(self._slots):
            location = self._location(slot, None, None)
            self.raise_for(
                "padding_write", "writes outside of null block 0", layer=layer, **location
            )
        part, position = self._token(token)
        expected = int(self._slots[token])
        location = self._location(slot, position, part.request) | {"layer": layer}
        did = f"writes slot {slot} instead of {expected}"
        if slot == expected:
            did = "writes a slot that holds another token"
        others = [each for each in self._parts if each is not part and block in each.blocks]
        own = [int(each) for each in part.blocks]
        if slot == expected or slot in self._slots:
            kind = "two_writers"
        elif block < 1 or block == expected // size or (block in own and not others):
            kind = "wrong_position"
        elif self._is_unused(block):
            kind = "use_after_free"
        else:
            kind = "shared_write" if block in own else "wrong_owner"
        self.raise_for(kind, did, history=self._history(before, block), **location)

    def _explain_read(
        self, layer: int, block: int, tag: int, number: int, position: int
    ) -> NoReturn:
        part, size = self._parts[number], self._shadow.block_size
        own, place = self._lineages[part.request], position // size
        right = int(part.blocks[place]) if place < len(part.blocks) else None
        location = self._location(block * size + position % size, position, part.request)
        did = "reads a slot that does not hold its token"
        if tag and own.position(tag) is not None:
            kind = "wrong_position"
        elif block != right:
            kind = "use_after_free" if self._is_unused(block) else "stale_table"
            did = f"reads block {block} instead of {right}"
        elif tag:
            kind = "wrong_owner"
        else:
            kind = "use_after_free" if self._is_unused(block) else "unwritten_read"
        location |= {"layer": layer, "history": self._history(tag, block)}
        self.raise_for(kind, did, **location)

    def _is_unused(self, block: int) -> bool:
        """Whether a block of the cache is free."""
        return 0 < block < len(self._freed) and self._is_free(block)

    def _reread(self) -> None:
        """Finds a block that several requests read, but is right for one of them only."""
        size, tags = self._shadow.block_size, self._tags()[0].cpu().numpy()
        for number, part in enumerate(self._parts):
            end = part.start + part.count
            held = np.asarray(part.blocks[: -(-end // size)], np.int64)
            there, first = tags[held].reshape(-1)[:end], part.first
            span = self._lineages[part.request].span(first, end)
            wrong = np.flatnonzero(there[first:] != span)
            if len(wrong):
                at = first + int(wrong[0])
                self._explain_read(0, int(held[at // size]), int(there[at]), number, at)

    def _history(self, tag: int, block: int) -> str:
        notes = []
        for lineage in reversed(self._lineages.values()) if tag else ():
            if (position := lineage.position(tag)) is not None:
                step = lineage.steps[position]
                when = f", written in step {step}" if step else ""
                notes.append(f"the slot held position {position} of request {lineage.name!r}{when}")
                break
        if 0 < block < len(self._freed) and self._freed[block]:
            notes.append(f"the block was last freed after step {self._freed[block]}")
        return ", ".join(notes)


def _slots(part: StepTokens, size: int) -> list[int]:
    start, count, blocks = part.start, part.count, part.blocks
    if start < 0 or count < 1 or start + count > len(blocks) * size:
        raise ValueError(
            f"request {part.request!r}: expected start >= 0, count >= 1 and blocks for them, got "
            f"start {start}, count {count} and {len(blocks)} blocks of {size}: reserve them first"
        )
    if count == 1:
        return [int(blocks[start // size]) * size + start % size]
    position = np.arange(start, start + count)
    slots: list[int] = (
        np.asarray(blocks, np.int64)[position // size] * size + position % size
    ).tolist()
    return slots


def poison(tensor: Tensor, blocks: NDArray[np.integer[Any]], num_blocks: int) -> None:
    """Fills blocks of a tensor with NaN; axis 0 is blocks, or the slots of all blocks."""
    at = torch.from_numpy(np.asarray(blocks, np.int64)).to(tensor.device)
    if tensor.is_floating_point() and tensor.itemsize == 1:
        tensor.view(torch.uint8).unflatten(0, (num_blocks, -1)).index_fill_(0, at, 0x7F)
    elif tensor.is_floating_point():
        tensor.unflatten(0, (num_blocks, -1)).index_fill_(0, at, torch.nan)
