"""The simulated step of an engine that keeps prompts and decodes apart."""

from __future__ import annotations

from typing import ClassVar

from compiled_attn.workloads.simulated.requests import SimulatedRequest
from compiled_attn.workloads.simulated.scheduler import SimulatedScheduler


class SeparateSteps(SimulatedScheduler):
    """One prompt's chunk, or else all decodes."""

    axes: ClassVar = {"decode": ("sequences", "blocks"), "prefill": ("tokens", "context")}

    def step(self) -> float:
        """Schedule and compute one step; returns its seconds."""
        if not self.prefilling:
            self.admit(self.engine.max_tokens)
        if self.prefilling:
            return self._prefill(next(iter(self.prefilling)))
        return self._decode()

    def _prefill(self, request: SimulatedRequest) -> float:
        context = request.computed
        count = min(request.known - context, self.engine.max_tokens)
        missing = -(-(context + count) // self.size) - len(request.blocks)
        if not self.make_room(request, missing):
            return 0.0
        self.grow(request, context + count)
        self.needs["prefill"].append((count, -(-context // self.size)))
        request.computed += count
        self.commit(request)
        self.after_chunk(request)
        time = self.engine.time
        return time.base + time.token * count + time.pair * count * (count + context)

    def _decode(self) -> float:
        self.begin_blocks()
        if not self.decoding:
            return 0.0
        tokens, held = self.decoding, self.pool.shared + self.pool.unique
        self.needs["decode"].append((tokens, held))
        self.advance()
        time = self.engine.time
        return time.base + time.token * tokens + time.block_slot * self.size * held
