"""Sizes, speed and requests of a simulated engine; tokens are counted, not generated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

from compiled_attn.engine.request_state import RequestState
from compiled_attn.engine.sampling import SamplingParams
from compiled_attn.workloads.arrival import Arrival

__all__ = ["BlockKey", "CountedTokens", "SimulatedEngine", "StepTime", "sequences"]


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

    Raises:
        ValueError: a size below 1, or more requests than tokens.
    """

    max_tokens: int = 256
    max_seqs: int = 32
    block_size: int = 32
    blocks: int = 2048
    time: StepTime = field(default_factory=StepTime)

    def __post_init__(self) -> None:
        for name in ("max_tokens", "max_seqs", "block_size", "blocks"):
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} >= 1, got {getattr(self, name)}: enlarge it")
        if self.max_seqs > self.max_tokens:
            raise ValueError(
                f"expected max_seqs <= max_tokens, got {self.max_seqs} > {self.max_tokens}: every "
                "running request needs a token in a step"
            )


BlockKey = tuple[int, int]


class CountedTokens:
    """The length of a request; block ``number`` has the key of ``chain`` or a unique one."""

    __slots__ = ("chain", "index", "length")

    def __init__(self, index: int, length: int, chain: list[BlockKey]) -> None:
        self.index, self.length, self.chain = index, length, chain

    def __len__(self) -> int:
        return self.length

    def key(self, number: int) -> BlockKey:
        """Return the key of a full block: prompts with a common prefix share keys."""
        return self.chain[number] if number < len(self.chain) else (-1 - self.index, number)


def sequences(arrivals: Sequence[Arrival], block_size: int) -> Iterator[RequestState]:
    """Yield a request state with `CountedTokens` for each arrival."""
    nodes: dict[tuple[int, int, int], int] = {}
    for index, arrival in enumerate(arrivals):
        tokens = CountedTokens(index, arrival.prompt_tokens, _chain(arrival, block_size, nodes))
        sampling = SamplingParams(max_new_tokens=arrival.output_tokens)
        counted = cast("list[int]", tokens)
        yield RequestState(index, counted, arrival.prompt_tokens, sampling, 0.0)


def _chain(arrival: Arrival, size: int, nodes: dict[tuple[int, int, int], int]) -> list[BlockKey]:
    """A key for each full block that prefix ids cover."""
    node, chain, hashed = 0, [], arrival.hash_block
    for prefix_id in arrival.prefix_ids:
        node = nodes.setdefault((node, prefix_id, hashed), len(nodes) + 1)
        chain.append(node)
    covered = min(arrival.prompt_tokens, len(chain) * hashed)
    return [(chain[-(-(at + 1) * size // hashed) - 1], at) for at in range(covered // size)]
