"""Blocks that a request needs where all layers have a sliding window."""

from __future__ import annotations

__all__ = ["blocks_before", "most_held"]


def blocks_before(position: int, window: int | None, block_size: int) -> int:
    """Returns the leading blocks that hold no token which one at ``position``, or a later one,
    sees. ``window``: tokens that a token sees, itself included; None: all before it.
    """
    return 0 if window is None else max(0, position - window + 1) // block_size


def most_held(length: int, window: int | None, step: int, block_size: int) -> int:
    """Returns the blocks that a request of ``length`` tokens holds at most at a time, if at most
    ``step`` of them are computed at once and blocks before the window are released.
    """
    whole = -(-length // block_size)
    return whole if window is None else min(whole, -(-(window + step) // block_size) + 1)
