"""The layout of a step: how it becomes the tensors of a bucket.

`TableLayout` is for the op that reads block tables, `PartsLayout` for plain torch. Nothing else
needs to know which one it has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from compiled_attn.attention.metadata import UnifiedMetadata
from compiled_attn.step.requests import StepRows
from graphs import BucketSpace

__all__ = ["ModelWork", "Plan", "StepLayout", "StepLimits"]


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The largest step that a scheduler can schedule.

    Args:
        draft: tokens of a draft, of each request of a step that only decodes.
    """

    tokens: int
    seqs: int
    context_blocks: int
    pool_blocks: int
    draft: int = 0


@dataclass(frozen=True, slots=True)
class ModelWork:
    """What a model computes, in floating point operations.

    Args:
        linear: work of a token outside attention (twice the weights).
        attention: work of one query with one key, over all layers.
        head: work of one row of logits.
    """

    linear: float
    attention: float
    head: float


class Plan(Protocol):
    """A step before padding."""

    rows: StepRows
    need: dict[str, int]

    def fill(self, bucket: Mapping[str, int] | None = None) -> Any:
        """Returns the batch padded to a bucket; None: to exactly what it needs.

        Raises:
            ValueError: the bucket is too small.
        """


class StepLayout(Protocol):
    """Turns the steps of a scheduler into tensors of fixed shapes."""

    @property
    def axes(self) -> tuple[str, ...]:
        """The sizes that a step is padded to."""

    @property
    def symbolic(self) -> tuple[str, ...]:
        """Axes whose sizes a graph may leave open, so that buckets share it."""

    @property
    def reads_range(self) -> bool:
        """Whether a step reads all blocks up to the highest used one: fragmentation costs time."""

    def ladder(
        self, limits: StepLimits, max_graphs: int, *, one_compile: bool = False
    ) -> BucketSpace:
        """Returns at most ``max_graphs`` buckets for all steps within limits.

        ``one_compile``: buckets that differ only on `symbolic` axes share one compile.
        """

    def cost(self, work: ModelWork) -> Callable[[Mapping[str, int]], float]:
        """Returns the relative cost of a bucket, by which the cheapest is picked."""

    def least_bytes(self, bucket: Mapping[str, int]) -> int:
        """Returns the bytes that a step of a bucket takes at least."""

    def smallest_need(self, blocks: int) -> dict[str, int]:
        """Returns the need of the last token of a request of so many blocks, alone in its step."""

    def largest_need(self, limits: StepLimits) -> dict[str, int] | None:
        """Returns the need that a bucket must hold so that no step is cut; None: steps may be."""

    def plan(self, rows: StepRows) -> Plan:
        """Plans a step.

        Raises:
            ValueError: it reads blocks that the cache does not have.
        """

    def padding(self, bucket: Mapping[str, int]) -> Any:
        """Returns a batch of padding alone, which writes to the null block only."""

    def batch(self, fields: Sequence[Tensor | None]) -> Any:
        """Returns the batch of these fields, in order; traceable."""

    def metadata(self, batch: Any, block_size: int) -> UnifiedMetadata:
        """Returns the metadata for `unified_attention`: traceable, no host work."""

    def logits_metadata(self, batch: Any, block_size: int) -> UnifiedMetadata | None:
        """Returns the rows ``logits_index`` of a batch as requests of one token each, which write
        to the null block and read what was written before; None: not supported.
        """

    def over(self, num_blocks: int, block_size: int, width: int) -> StepLayout:
        """Returns the same layout over another cache."""
