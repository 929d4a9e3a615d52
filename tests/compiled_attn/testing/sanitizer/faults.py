"""Faults of an engine, each as a context in which its next steps corrupt the cache."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from compiled_attn.engine import Engine
from compiled_attn.step.parts import StepPlan
from compiled_attn.step.tables import TablePlan

PLANS = TablePlan, StepPlan


@contextlib.contextmanager
def changed_batches(change: Callable[[Any, Any], Any]) -> Iterator[None]:
    """Context in which each batch is what ``change(plan, batch)`` returns."""

    def wrapped(fill: Any) -> Any:
        return lambda plan, *args: change(plan, fill(plan, *args))

    with contextlib.ExitStack() as stack:
        for each in PLANS:
            stack.enter_context(mock.patch.object(each, "fill", wrapped(each.fill)))
        yield


def _slots(change: Callable[[Any, torch.Tensor], None]) -> Any:
    def changed(plan: Any, batch: Any) -> Any:
        slots = batch.slot_mapping.clone()
        change(plan, slots)
        return batch._replace(slot_mapping=slots)

    return changed_batches(changed)


def freed_too_early(engine: Engine) -> Any:
    """A reference is dropped twice: the block is free while its request runs."""
    table = engine.pool.table(engine.pool.requests[0])
    engine.pool._blocks.release(table.blocks[-1])
    return contextlib.nullcontext()


def skipped_token(engine: Engine) -> Any:
    """The scheduler counts a token as computed that no step has computed."""
    sequence = engine.scheduler.running[0]
    sequence.tokens.append(5)
    sequence.computed += 1
    return contextlib.nullcontext()


def swapped_blocks(engine: Engine) -> Any:
    """Two blocks of a request change places in what the graph reads."""

    def swapped(plan: Any, batch: Any) -> Any:
        if hasattr(batch, "block_tables"):
            tables = batch.block_tables.clone()
            tables[0, [0, 1]] = tables[0, [1, 0]]
            return batch._replace(block_tables=tables)
        blocks = batch.unique_blocks.clone()
        blocks[[0, 1]] = blocks[[1, 0]]
        return batch._replace(unique_blocks=blocks)

    return changed_batches(swapped)


def other_owner(engine: Engine) -> Any:
    """The prefix index gives a block of other tokens to the next request."""
    index = engine.pool._index
    wrong = next(iter(index._key_of))

    def match(prompt: Any, salt: Any = None, *, limit: int | None = None) -> Any:
        return [wrong], b"key"

    engine.submit([7] * 20)
    return mock.patch.object(index, "match", match)


def shared_partial(engine: Engine) -> Any:
    """A second request holds the last block of a running one, without a copy."""
    pool = engine.pool
    first, second = (pool.table(each) for each in pool.requests[:2])
    pool._blocks.acquire(first.blocks[-1])
    second.blocks[-1] = second._array[len(second.blocks) - 1] = first.blocks[-1]
    return contextlib.nullcontext()


def one_slot_twice(engine: Engine) -> Any:
    """Two tokens of a step are written to one slot."""

    def twice(plan: Any, slots: torch.Tensor) -> None:
        slots[1] = slots[0]

    return _slots(twice)


def stale_batch(engine: Engine) -> Any:
    """The graph reads the inputs of an earlier step (torchtitan#3668, #3709)."""
    kept: list[Any] = []

    def stale(plan: Any, batch: Any) -> Any:
        kept.append(type(batch)(*(None if each is None else each.clone() for each in batch)))
        return kept[0]

    return changed_batches(stale)


def written_padding(engine: Engine) -> Any:
    """Padded tokens write to slot -1, the last one (vllm#43810)."""

    def padding(plan: Any, slots: torch.Tensor) -> None:
        slots[len(plan.rows.slots) :] = -1 % (engine.pool.num_blocks * engine.pool.block_size)

    return _slots(padding)


FAULTS = {
    "use_after_free": freed_too_early,
    "unwritten_read": skipped_token,
    "wrong_position": swapped_blocks,
    "wrong_owner": other_owner,
    "shared_write": shared_partial,
    "two_writers": one_slot_twice,
    "stale_table": stale_batch,
    "padding_write": written_padding,
}
"""A fault for each kind."""
