"""Lists of ``(source, destination)`` blocks: checked, padded, and run by captured graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compiled_attn.arguments import whole
from graphs import Bucket, BucketEvent, CaptureError, WarmupManager, WarmupReport, explicit
from graphs.capture.contract import Backend

__all__ = ["PaddedPairs", "Pairs", "distinct_blocks", "move_pairs", "swap_pairs"]

Pairs: TypeAlias = "Iterable[tuple[int, int]] | NDArray[np.integer]"


class PaddedPairs:
    """Pads pairs of blocks with ``(0, 0)`` to a pad size and runs the graph captured for it.

    Args:
        function: takes ``sources [P]`` and ``destinations [P]`` int64.
        axis: name of the lists in buckets, errors and reports.
        pad_sizes: lengths P to capture, each at least 1.
        strict: raise if a pad size cannot be captured; else a larger one replaces it.
    """

    def __init__(
        self,
        function: Callable[[Tensor, Tensor], None],
        axis: str,
        *,
        pad_sizes: Iterable[int],
        device: torch.device,
        backend: str | Backend,
        strict: bool,
        **options: Any,
    ) -> None:
        sizes = [whole("pad size", size, 1) for size in pad_sizes]
        self._graphs = WarmupManager(
            function,
            explicit([axis], sizes),
            self._padding,
            backend=backend,
            strict=strict,
            name=axis,
            **options,
        )
        self._axis = axis
        self._device = device
        self._strict = strict
        self._largest = 0

    def warmup(self, progress: Callable[[BucketEvent], None] | None = None) -> WarmupReport:
        """Captures every pad size; raises `graphs.CaptureError` if one (strict) or all fail."""
        report = self._graphs.warmup(progress)
        missing = [*report.failed, *report.skipped]
        if missing and (self._strict or not report.captured):
            raise CaptureError(f"{self._axis}[{missing[0].bucket}]", missing[0].error)
        self._largest = max(result.bucket[self._axis] for result in report.captured)
        return report

    @property
    def pending(self) -> int:
        """Number of pad sizes that are not captured yet."""
        return self._graphs.pending

    @property
    def is_ready(self) -> bool:
        """Whether graphs are captured."""
        return self._largest > 0

    def split(self, pairs: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Splits pairs ``[N, 2]`` into parts that fit the largest captured pad size."""
        return [pairs[at : at + self._largest] for at in range(0, len(pairs), self._largest)]

    def run(self, pairs: NDArray[np.int64]) -> None:
        """Runs the graph of the smallest pad size that holds ``pairs [N, 2]``."""
        bucket = self._graphs.bucket(**{self._axis: len(pairs)})
        padded = np.zeros((2, bucket[self._axis]), dtype=np.int64)
        padded[:, : len(pairs)] = pairs.T
        self._graphs.run(bucket, *torch.from_numpy(padded).to(self._device).unbind())

    def close(self) -> None:
        """Frees the graphs."""
        self._largest = 0
        self._graphs.close()

    def _padding(self, bucket: Bucket) -> list[Tensor]:
        size = bucket[self._axis]
        return [torch.zeros(size, dtype=torch.int64, device=self._device) for _ in range(2)]


def swap_pairs(pairs: Pairs, num_blocks: int) -> NDArray[np.int64]:
    """Returns the pairs of an exchange, ``[N, 2]``, without padding; raises for bad ones."""
    checked = _in_range(pairs, num_blocks)
    _check_distinct(checked.ravel(), "block", "swap")
    return checked


def move_pairs(pairs: Pairs, num_blocks: int) -> NDArray[np.int64]:
    """Returns the pairs of a one-way copy, ``[N, 2]``, without padding; raises for bad ones."""
    checked = _in_range(pairs, num_blocks)
    _check_distinct(checked[:, 1], "destination", "move")
    both = np.intersect1d(checked[:, 0], checked[:, 1])
    if both.size:
        raise ValueError(
            f"expected destinations that are not sources, got block {both[0]} as both: "
            "swap them, or move in two calls"
        )
    return checked


def distinct_blocks(
    blocks: Sequence[int] | NDArray[np.integer], num_blocks: int
) -> NDArray[np.int64]:
    """Returns distinct blocks as an array ``[N]``; raises for bad ones."""
    given = np.asarray(blocks)
    if given.dtype.kind not in "iu" or given.ndim != 1:
        raise TypeError(
            f"expected integer blocks [N], got {given.dtype} of shape {list(given.shape)}: "
            "pass a list of ints"
        )
    wrong = given[(given < 1) | (given >= num_blocks)]
    if wrong.size:
        raise ValueError(
            f"expected blocks in 1..{num_blocks - 1}, got {wrong[0]}: it is not in this cache"
        )
    checked = given.astype(np.int64)
    _check_distinct(checked, "block", "list")
    return checked


def _in_range(pairs: Pairs, num_blocks: int) -> NDArray[np.int64]:
    given = np.asarray(pairs if isinstance(pairs, np.ndarray) else list(pairs))
    if not given.size:
        return np.zeros((0, 2), dtype=np.int64)
    if given.dtype.kind not in "iu":
        raise TypeError(f"expected pairs of integer blocks, got {given.dtype}: pass ints")
    if given.ndim != 2 or given.shape[1] != 2:
        raise ValueError(
            f"expected pairs of shape [N, 2], got {list(given.shape)}: pass (source, destination)"
        )
    wrong = (given < 0) | (given >= num_blocks)
    if wrong.any():
        raise ValueError(
            f"expected blocks in 0..{num_blocks - 1}, got {given[wrong][0]} in pair "
            f"{_shown(given[wrong.any(axis=1)][0])}: it is not in this cache"
        )
    padding = (given == 0).sum(axis=1)
    if (padding == 1).any():
        raise ValueError(
            f"expected no pair with null block 0 but the padding (0, 0), got "
            f"{_shown(given[padding == 1][0])}: the null block never moves"
        )
    real: NDArray[np.int64] = given[padding == 0].astype(np.int64)
    return real


def _check_distinct(blocks: NDArray[np.int64], name: str, what: str) -> None:
    ordered = np.sort(blocks)
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if twice.size:
        raise ValueError(
            f"expected every {name} once in a {what}, got {name} {twice[0]} twice: "
            "split the pairs into several calls"
        )


def _shown(pair: NDArray[np.integer]) -> tuple[int, int]:
    return int(pair[0]), int(pair[1])
