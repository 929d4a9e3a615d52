"""The requests of a simulated engine: tokens that are counted only, and names for their blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

from compiled_attn.engine.sampling import SamplingParams
from compiled_attn.engine.sequence import Sequence as EngineSequence
from compiled_attn.workloads.arrival import Arrival

__all__ = ["BlockKey", "CountedTokens", "sequences"]

BlockKey = tuple[int, int]


class CountedTokens:
    """So many tokens of a request; block ``number`` has a name, that of ``chain`` or its own."""

    __slots__ = ("chain", "index", "length")

    def __init__(self, index: int, length: int, chain: list[BlockKey]) -> None:
        self.index, self.length, self.chain = index, length, chain

    def __len__(self) -> int:
        return self.length

    def key(self, number: int) -> BlockKey:
        """The name of a full block: prompts that begin alike share names."""
        return self.chain[number] if number < len(self.chain) else (-1 - self.index, number)


def sequences(arrivals: Sequence[Arrival], block_size: int) -> Iterator[EngineSequence]:
    """The sequences of a demand, of `CountedTokens`, which the engine's scheduler only counts."""
    nodes: dict[tuple[int, int, int], int] = {}
    for index, arrival in enumerate(arrivals):
        tokens = CountedTokens(index, arrival.prompt_tokens, _chain(arrival, block_size, nodes))
        sampling = SamplingParams(max_new_tokens=arrival.output_tokens)
        counted = cast("list[int]", tokens)
        yield EngineSequence(index, counted, arrival.prompt_tokens, sampling, 0.0)


def _chain(arrival: Arrival, size: int, nodes: dict[tuple[int, int, int], int]) -> list[BlockKey]:
    """A name for each full block that prefix ids cover."""
    node, chain, hashed = 0, [], arrival.hash_block
    for prefix_id in arrival.prefix_ids:
        node = nodes.setdefault((node, prefix_id, hashed), len(nodes) + 1)
        chain.append(node)
    covered = min(arrival.prompt_tokens, len(chain) * hashed)
    return [(chain[-(-(at + 1) * size // hashed) - 1], at) for at in range(covered // size)]
