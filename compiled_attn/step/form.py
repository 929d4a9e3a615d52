"""The form of a step: everything about how a step becomes the tensors of a bucket.

There are two, `Tables` for the op that reads block tables and `Parts` for plain torch. Whoever
holds a form need not ask which one it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from compiled_attn.attention.metadata import UnifiedMetadata
from compiled_attn.step.requests import StepRows
from graphs import BucketSpace

__all__ = [
    "ModelWork",
    "Plan",
    "StepForm",
    "StepLimits",
]


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The largest step that a scheduler can make.

    Args:
        tokens: new tokens of all requests.
        seqs: requests.
        context_blocks: blocks of the longest request.
        pool_blocks: blocks that requests can hold.
    """

    tokens: int
    seqs: int
    context_blocks: int
    pool_blocks: int


@dataclass(frozen=True, slots=True)
class ModelWork:
    """What a model computes, in floating point operations.

    Args:
        linear: of one token outside attention (twice the weights it meets).
        attention: of one query with one key, over all layers.
        head: of one row of logits.
    """

    linear: float
    attention: float
    head: float


class Plan(Protocol):
    """A step before padding: what it needs, and how it fills a bucket."""

    rows: StepRows
    need: dict[str, int]

    def fill(self, bucket: Mapping[str, int] | None = None) -> Any:
        """The batch padded to a bucket; None: to exactly what it needs.

        Raises:
            ValueError: the bucket is too small.
        """


class StepForm(Protocol):
    """How the steps of a scheduler become tensors of fixed shapes."""

    @property
    def axes(self) -> tuple[str, ...]:
        """The sizes that a step is padded to."""

    @property
    def symbolic(self) -> tuple[str, ...]:
        """Those of the axes whose sizes a graph may leave open, so that buckets share it."""

    @property
    def reads_range(self) -> bool:
        """Whether a step reads all places up to the highest used one: spread blocks cost time."""

    def ladder(
        self, limits: StepLimits, max_graphs: int, *, one_compile: bool = False
    ) -> BucketSpace:
        """Buckets for all steps within limits, ``max_graphs`` of them at most.

        ``one_compile``: one serves all whose `symbolic` axes differ.
        """

    def cost(self, work: ModelWork) -> Callable[[Mapping[str, int]], float]:
        """The relative cost of a bucket, by which the cheapest is picked."""

    def least_bytes(self, bucket: Mapping[str, int]) -> int:
        """Bytes that a step of a bucket takes at least."""

    def smallest_need(self, blocks: int) -> dict[str, int]:
        """What the last token of a request needs that reads so many blocks, alone in its step."""

    def largest_need(self, limits: StepLimits) -> dict[str, int] | None:
        """What a bucket must hold for no step to be cut; None: steps may be cut."""

    def plan(self, rows: StepRows) -> Plan:
        """A step, ready to fill a bucket.

        Raises:
            ValueError: it reads blocks that the cache does not have.
        """

    def padding(self, bucket: Mapping[str, int]) -> Any:
        """A batch of padding alone, to capture a bucket with: it writes to the null block only."""

    def batch(self, fields: Sequence[Tensor | None]) -> Any:
        """The batch of tensors that are its fields, in order; traceable."""

    def metadata(self, batch: Any, block_size: int) -> UnifiedMetadata:
        """A batch for `unified_attention`: traceable, no host work."""

    def wanted(self, batch: Any, block_size: int) -> UnifiedMetadata | None:
        """The rows ``logits_index`` of a batch as requests of one token each, which write to the
        null block; None: the form does not know that.

        What they read must have been written.
        """

    def over(self, num_blocks: int, block_size: int, width: int) -> StepForm:
        """The same form over another cache."""
