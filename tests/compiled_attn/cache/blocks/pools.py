"""Shortcuts: a request computed at once, and pending copies performed at once."""

from __future__ import annotations

from compiled_attn.cache.blocks import BlockPool, BlockTable


def perform_copies(pool: BlockPool) -> list[tuple[int, int]]:
    """Reports all pending copies as performed, and returns them."""
    pairs = pool.pending_copies()
    pool.copied(pairs)
    return pairs


def run(pool: BlockPool, name: str, tokens: list[int]) -> BlockTable:
    """Adds a request and computes all of its prompt."""
    table = pool.add(name, tokens)
    pool.reserve(name, len(tokens))
    perform_copies(pool)
    pool.commit(name, tokens, len(tokens))
    return table
