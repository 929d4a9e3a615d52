"""The simulated step of an engine that keeps prompts and decodes apart."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import ClassVar, cast

from compiled_attn.engine.scheduler import ScheduledStep, ScheduledTokens, Scheduler
from compiled_attn.engine.sequence import Sequence as EngineSequence
from compiled_attn.workloads.simulated.steps import SimulatedSteps

__all__ = ["SeparateSteps"]


class OneKind(Scheduler):
    """One prompt's chunk, or else all decodes."""

    prefills = False

    def schedule(self, ending: Collection[EngineSequence] = ()) -> ScheduledStep:
        """The next chunk, or else all decodes; a prompt is admitted as soon as there is room."""
        step: dict[EngineSequence, int] = {}
        self.changed = []
        started = [sequence for sequence in self.running if sequence.remaining > 1]
        if not started and len(self.running) < (limit := self.max_seqs):
            self.max_seqs = len(self.running) + 1
            self._admit(step, self.max_tokens, 0)
            self.max_seqs = limit
        self.prefills = bool(started or step)
        for sequence in started[:1] if started else [*self.running] if not step else []:
            self._place(sequence, step, self.max_tokens)
        return ScheduledStep(step)


class SeparateSteps(SimulatedSteps):
    """One prompt's chunk, or else all decodes."""

    axes: ClassVar = {"decode": ("sequences", "blocks"), "prefill": ("tokens", "context")}
    scheduler_type = OneKind

    def note(self, step: Sequence[ScheduledTokens]) -> float:
        """Note what a step needs; returns its seconds."""
        time, size = self.engine.time, self.engine.block_size
        if cast("OneKind", self.scheduler).prefills:
            (part,) = step
            count, context = part.count, part.sequence.computed
            self.needs["prefill"].append((count, -(-context // size)))
            return time.base + time.token * count + time.pair * count * (count + context)
        tokens, held = len(step), self.blocks_of_decodes(step)
        self.needs["decode"].append((tokens, held))
        return time.base + time.token * tokens + time.block_slot * size * held

    def blocks_of_decodes(self, step: Sequence[ScheduledTokens]) -> int:
        """The distinct blocks that decodes read."""
        return sum(self.blocks_read(step))
