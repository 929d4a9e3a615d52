"""Requests on their way through the simulated engine, and the names of their blocks."""

from __future__ import annotations

from compiled_attn.workloads.arrival import Arrival

__all__ = ["BlockKey", "Chains", "SimulatedRequest"]

BlockKey = tuple[int, int]


class Chains:
    """Names for the full prompt blocks that other prompts may have too."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._nodes: dict[tuple[int, int, int], int] = {}

    def keys(self, arrival: Arrival) -> list[BlockKey]:
        """One name for each full block that ids cover; prompts that begin alike share them."""
        size, hashed = self._block_size, arrival.hash_block
        if not arrival.prefix_ids:
            return []
        node, chain = 0, []
        for prefix_id in arrival.prefix_ids:
            node = self._nodes.setdefault((node, prefix_id, hashed), len(self._nodes) + 1)
            chain.append(node)
        covered = min(arrival.prompt_tokens, len(chain) * hashed)
        return [(chain[-(-(at + 1) * size // hashed) - 1], at) for at in range(covered // size)]


class SimulatedRequest:
    """A request on its way: ``known`` tokens, of them ``computed`` at decode number ``since``."""

    __slots__ = ("blocks", "chain", "computed", "index", "keyed", "known", "left", "since", "stamp")

    def __init__(self, index: int, arrival: Arrival, chain: list[BlockKey]) -> None:
        self.index, self.chain = index, chain
        self.known, self.left = arrival.prompt_tokens, arrival.output_tokens
        self.computed = self.keyed = self.stamp = 0
        self.since: int | None = None
        self.blocks: list[int] = []

    def key(self, number: int) -> BlockKey:
        """The name of a full block: its chain's, or its own."""
        return self.chain[number] if number < len(self.chain) else (-1 - self.index, number)
