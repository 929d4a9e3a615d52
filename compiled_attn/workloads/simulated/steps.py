"""One simulated step, of prompts and decodes together."""

from __future__ import annotations

from typing import ClassVar

from compiled_attn.workloads.simulated.requests import SimulatedRequest
from compiled_attn.workloads.simulated.scheduler import SimulatedScheduler

__all__ = ["MixedSteps"]


class MixedSteps(SimulatedScheduler):
    """All decodes, then the rest of started prompts, then new ones, as far as tokens go."""

    axes: ClassVar = {
        "engine": ("tokens", "shared", "unique", "logits"),
        "table": ("tokens", "requests"),
    }

    def step(self) -> float:
        """Schedule and compute one step; returns its seconds."""
        undisturbed = self.begin_blocks()
        parts: dict[SimulatedRequest, int] = {}
        for request in list(self.prefilling):
            count = min(request.known - request.computed, self._room(parts))
            if not count or request not in self.running:
                continue
            length, before = request.computed + count, len(self.running)
            if self.make_room(request, -(-length // self.size) - len(request.blocks)):
                self.grow(request, length)
                parts[request] = count
            if len(self.running) != before:
                undisturbed = False
                parts = {r: n for r, n in parts.items() if r in self.running}
        while undisturbed and (count := self.admit(self._room(parts))):
            parts[next(reversed(self.running))] = count
        return self._compute(parts)

    def _room(self, parts: dict[SimulatedRequest, int]) -> int:
        return self.engine.max_tokens - self.decoding - sum(parts.values())

    def _compute(self, parts: dict[SimulatedRequest, int]) -> float:
        if not parts and not self.decoding:
            return 0.0
        shared, unique = self._blocks(parts)
        tokens = self.decoding + sum(parts.values())
        requests = self.decoding + len(parts)  # each has a row of logits
        self.needs["engine"].append((tokens, shared, unique, requests))
        self.needs["table"].append((tokens, requests))
        for request, count in parts.items():
            request.computed += count
            self.commit(request)
        self.advance()
        for request in parts:
            self.after_chunk(request)
        time = self.engine.time
        pairs = time.pair * tokens * (tokens + shared * self.size)
        return time.base + time.token * tokens + pairs + time.block_slot * self.size * unique

    def _blocks(self, parts: dict[SimulatedRequest, int]) -> tuple[int, int]:
        """Shared and unique blocks; a part of one token reads as a decode does."""
        single = [request for request, count in parts.items() if count == 1]
        for request in single:
            self.pool.read(request.blocks)
        found = self.pool.counts(
            block
            for request, count in parts.items()
            if count > 1
            for block in request.blocks[: -(-request.computed // self.size)]
        )
        for request in single:
            self.pool.unread(request.blocks)
        return found
