"""Sizes, speed and requests of a simulated engine; tokens are counted, not generated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
from numpy.typing import NDArray

from compiled_attn.engine.request_state import RequestState
from compiled_attn.engine.sampling import SamplingParams
from compiled_attn.workloads.arrival import Arrival

__all__ = ["CountedTokens", "SimulatedEngine", "StepTime", "sequences"]


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a simulated step, as a sum over what it computes and reads.

    The defaults are a roofline of an 8-billion-parameter model (16-bit, grouped queries) on one
    data-centre accelerator: 1e15 operations and 3e12 bytes a second.

    Args:
        base: per step.
        token: per new token.
        pair: per query and key of a prompt chunk.
        block_slot: per slot of a cached block that one token reads.
    """

    base: float = 6e-3
    token: float = 15e-6
    pair: float = 1e-9
    block_slot: float = 44e-9


@dataclass(frozen=True, slots=True)
class SimulatedEngine:
    """Sizes of a simulated engine.

    Args:
        max_tokens: tokens of a step at most.
        max_seqs: requests that run at the same time at most (<= max_tokens).
        block_size: slots in a block.
        blocks: blocks of the pool, without the null block.
        time: seconds of steps.
        window: see `BlockPool`.

    Raises:
        ValueError: a size below 1, or more requests than tokens.
    """

    max_tokens: int = 256
    max_seqs: int = 32
    block_size: int = 32
    blocks: int = 2048
    time: StepTime = field(default_factory=StepTime)
    window: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_tokens", "max_seqs", "block_size", "blocks"):
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} >= 1, got {getattr(self, name)}: enlarge it")
        if self.max_seqs > self.max_tokens:
            raise ValueError(
                f"expected max_seqs <= max_tokens, got {self.max_seqs} > {self.max_tokens}: every "
                "running request needs a token in a step"
            )


class CountedTokens:
    """The length of a request whose tokens are all equal within a block.

    ``contents`` are those of the blocks that other requests may share.
    """

    __slots__ = ("contents", "index", "length", "size")

    def __init__(self, index: int, length: int, contents: list[int], block_size: int) -> None:
        self.index, self.length, self.contents, self.size = index, length, contents, block_size

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, positions: slice) -> NDArray[np.int64]:
        """Return the tokens of whole blocks."""
        first, stop = positions.start // self.size, positions.stop // self.size
        own = [-1 - self.index] * (stop - max(first, len(self.contents)))
        return np.repeat(np.array(self.contents[first:stop] + own, np.int64), self.size)


def sequences(arrivals: Sequence[Arrival], block_size: int) -> Iterator[RequestState]:
    """Yield a request state with `CountedTokens` for each arrival."""
    nodes: dict[tuple[int, int, int], int] = {}  # of the tree of prefixes
    for index, arrival in enumerate(arrivals):
        node, chain, size = 0, [], arrival.hash_block
        for prefix_id in arrival.prefix_ids:
            node = nodes.setdefault((node, prefix_id, size), len(nodes) + 1)
            chain.append(node)
        length = arrival.prompt_tokens
        covered = min(length, len(chain) * size) // block_size
        contents = [chain[-(-(at + 1) * block_size // size) - 1] for at in range(covered)]
        tokens = cast("list[int]", CountedTokens(index, length, contents, block_size))
        sampling = SamplingParams(max_new_tokens=arrival.output_tokens)
        yield RequestState(index, tokens, length, sampling, 0.0)
