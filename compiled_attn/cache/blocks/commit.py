"""The commit of computed positions, after which full blocks are found by their content."""

from __future__ import annotations

from compiled_attn.cache.blocks.copies import PendingCopies
from compiled_attn.cache.blocks.partial_hits import TOKEN_BYTES
from compiled_attn.cache.blocks.prefix import PrefixIndex, Tokens, check_tokens, token_bytes
from compiled_attn.cache.blocks.table import BlockTable

__all__ = ["check_commit", "publish", "withdraw"]


def check_commit(table: BlockTable, tokens: Tokens, length: int, copies: PendingCopies) -> None:
    """Raise what `BlockPool.commit` raises."""
    if not table.num_computed <= length <= table.length:
        raise ValueError(
            f"expected a length between {table.num_computed} (computed) and {table.length} "
            f"(reserved) for request {table.request_id!r}, got {length}: "
            "reserve before, and commit only forward"
        )
    check_tokens(tokens)
    if len(tokens) < length:
        raise ValueError(
            f"expected at least {length} tokens for request {table.request_id!r}, "
            f"got {len(tokens)}: pass the prompt too"
        )
    if length > table.num_computed and copies:
        _check_copied(table, length, copies)


def publish(index: PrefixIndex, table: BlockTable, tokens: Tokens, length: int) -> None:
    """Let the blocks that became full with ``length`` computed positions be found, or parts of one.

    Nothing of a table that was withdrawn is.
    """
    key, start, stop = table._key, table._num_keyed, _findable(index, table, length)
    if key is None or stop <= start * table.block_size:
        return
    size = table.block_size * TOKEN_BYTES
    # All tokens before the first insertion: a bad one must change nothing.
    data = token_bytes(tokens[start * table.block_size : stop])
    for number, block in enumerate(table.blocks[start : _blocks_of(table, stop)]):
        part = data[number * size : (number + 1) * size]
        key = index.put(key, part, block)
    table._key, table._num_keyed = key, stop // table.block_size


def withdraw(index: PrefixIndex, table: BlockTable, first: int) -> None:
    """Let none of the table's blocks from the ``first`` on be found.

    Without a key no later block of the table, and of none forked from it, has one.
    """
    table._key = None
    for block in table.blocks[first:]:
        index.withdraw(block)


def _check_copied(table: BlockTable, length: int, copies: PendingCopies) -> None:
    waiting = [block for block in _written(table, length) if block in copies]
    if waiting:
        raise RuntimeError(
            f"expected the blocks of request {table.request_id!r} to be copied before they are "
            f"written, got blocks {waiting} waiting: perform pending_copies() before each step, "
            "and say so with copied()"
        )


def _written(table: BlockTable, length: int) -> list[int]:
    return table.blocks[table.num_computed // table.block_size : _blocks_of(table, length)]


def _findable(index: PrefixIndex, table: BlockTable, length: int) -> int:
    """Up to which position blocks are indexed once ``length`` positions are computed."""
    full = length - length % table.block_size
    if index.min_partial is None:
        return full
    before = max(0, table.num_computed - full)
    step = index.min_partial
    return length if (length - full) // step > before // step else full


def _blocks_of(table: BlockTable, length: int) -> int:
    return -(-length // table.block_size)
