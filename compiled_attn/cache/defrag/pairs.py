"""Lists of ``(source, destination)`` places, checked before anything is copied."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["Pairs", "move_pairs", "single_places", "swap_pairs"]

Pairs: TypeAlias = "Iterable[tuple[int, int]] | NDArray[np.integer]"


def swap_pairs(pairs: Pairs, num_blocks: int) -> NDArray[np.int64]:
    """The pairs of an exchange, ``[N, 2]``, without padding.

    Raises:
        TypeError: they are no integers.
        ValueError: a place is out of range, the null block's, or there twice.
    """
    checked = _in_range(pairs, num_blocks)
    _need_once(checked.ravel(), "place", "swap")
    return checked


def move_pairs(pairs: Pairs, num_blocks: int) -> NDArray[np.int64]:
    """The pairs of a one-way copy, ``[N, 2]``, without padding; a source may be there twice.

    Raises:
        TypeError: they are no integers.
        ValueError: a place is out of range or the null block's, or a destination is there twice or
            is a source.
    """
    checked = _in_range(pairs, num_blocks)
    _need_once(checked[:, 1], "destination", "move")
    both = np.intersect1d(checked[:, 0], checked[:, 1])
    if both.size:
        raise ValueError(
            f"expected destinations that are no sources, got place {both[0]} as both: "
            "swap them, or move in two calls"
        )
    return checked


def single_places(
    places: Sequence[int] | NDArray[np.integer], num_blocks: int
) -> NDArray[np.int64]:
    """Places of blocks, ``[N]``.

    Raises:
        TypeError: they are no integers.
        ValueError: a place is out of range, the null block's, or there twice.
    """
    given = np.asarray(places)
    if given.dtype.kind not in "iu" or given.ndim != 1:
        raise TypeError(
            f"expected integer places [N], got {given.dtype} of shape {list(given.shape)}: "
            "pass a list of ints"
        )
    wrong = given[(given < 1) | (given >= num_blocks)]
    if wrong.size:
        raise ValueError(
            f"expected places in 1..{num_blocks - 1}, got {wrong[0]}: it is no block of this cache"
        )
    checked = given.astype(np.int64)
    _need_once(checked, "place", "list")
    return checked


def _in_range(pairs: Pairs, num_blocks: int) -> NDArray[np.int64]:
    given = np.asarray(pairs if isinstance(pairs, np.ndarray) else list(pairs))
    if not given.size:
        return np.zeros((0, 2), dtype=np.int64)
    if given.dtype.kind not in "iu":
        raise TypeError(f"expected pairs of integer places, got {given.dtype}: pass ints")
    if given.ndim != 2 or given.shape[1] != 2:
        raise ValueError(
            f"expected pairs of shape [N, 2], got {list(given.shape)}: pass (source, destination)"
        )
    wrong = (given < 0) | (given >= num_blocks)
    if wrong.any():
        raise ValueError(
            f"expected places in 0..{num_blocks - 1}, got {given[wrong][0]} in pair "
            f"{_shown(given[wrong.any(axis=1)][0])}: it is not in this cache"
        )
    padding = (given == 0).sum(axis=1)
    if (padding == 1).any():
        raise ValueError(
            f"expected no pair with null block 0 but the padding (0, 0), got "
            f"{_shown(given[padding == 1][0])}: the null block stays where and what it is"
        )
    kept: NDArray[np.int64] = given[padding == 0].astype(np.int64)
    return kept


def _need_once(places: NDArray[np.int64], name: str, what: str) -> None:
    ordered = np.sort(places)
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if twice.size:
        raise ValueError(
            f"expected every {name} once in a {what}, got {name} {twice[0]} twice: "
            "split the pairs into several calls"
        )


def _shown(pair: NDArray[np.integer]) -> tuple[int, int]:
    return int(pair[0]), int(pair[1])
