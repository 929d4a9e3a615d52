"""Which blocks of a computed table can be found by their content, and from where on none can."""

from __future__ import annotations

from compiled_attn.blocks.partial import TOKEN_BYTES
from compiled_attn.blocks.prefix import PrefixIndex, Tokens, token_bytes
from compiled_attn.blocks.table import BlockTable

__all__ = ["publish", "withhold"]


def publish(index: PrefixIndex, table: BlockTable, tokens: Tokens, length: int) -> None:
    """Let the blocks that became full with ``length`` computed positions be found, or parts of one.

    Nothing of a table of which something was withheld is.
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


def withhold(index: PrefixIndex, table: BlockTable, length: int) -> None:
    """Let nothing that is computed from here on be found, nor the block that it continues.

    Without a key no later block of the table, and of none forked from it, has one.
    """
    table._key = None
    for block in table.blocks[table.num_computed // table.block_size : _blocks_of(table, length)]:
        index.withdraw(block)


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
