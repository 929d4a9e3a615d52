"""A callable of two index lists, captured once a pad size, for lists of any length."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from compiled_attn.arguments import whole
from graphs import Bucket, BucketEvent, CaptureError, WarmupManager, WarmupReport, explicit
from graphs.capture.contract import Backend

__all__ = ["PaddedLists"]


class PaddedLists:
    """Pads pairs of places with ``(0, 0)`` to a pad size and runs the graph captured for it.

    Args:
        function: takes ``sources [P]`` and ``destinations [P]`` int64.
        axis: names the lists in buckets, errors and reports.
        pad_sizes: the lengths P to capture, each at least 1.
        device: of the lists.
        backend, options: see `graphs.WarmupManager`.
        strict: a pad size that cannot be captured is an error; else a larger one serves its lists.
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
        """Captures every pad size; running the padding changes nothing.

        Raises:
            graphs.CaptureError: one could not be captured (strict), or none.
        """
        report = self._graphs.warmup(progress)
        missing = [*report.failed, *report.skipped]
        if missing and (self._strict or not report.captured):
            raise CaptureError(f"{self._axis}[{missing[0].bucket}]", missing[0].error)
        self._largest = max(result.bucket[self._axis] for result in report.captured)
        return report

    @property
    def pending(self) -> int:
        """How many pad sizes are not captured yet."""
        return self._graphs.pending

    @property
    def is_ready(self) -> bool:
        """Whether graphs are captured."""
        return self._largest > 0

    def split(self, pairs: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """The pairs ``[N, 2]`` in parts that the largest captured pad size holds."""
        return [pairs[at : at + self._largest] for at in range(0, len(pairs), self._largest)]

    def run(self, pairs: NDArray[np.int64]) -> None:
        """Runs the graph of the smallest pad size that holds ``pairs [N, 2]``."""
        bucket = self._graphs.bucket(**{self._axis: len(pairs)})
        padded = np.zeros((2, bucket[self._axis]), dtype=np.int64)
        padded[:, : len(pairs)] = pairs.T
        lists = [torch.from_numpy(row).to(self._device) for row in padded]
        self._graphs.run(bucket, *lists)

    def close(self) -> None:
        """Frees the graphs."""
        self._largest = 0
        self._graphs.close()

    def _padding(self, bucket: Bucket) -> list[Tensor]:
        size = bucket[self._axis]
        return [torch.zeros(size, dtype=torch.int64, device=self._device) for _ in range(2)]
