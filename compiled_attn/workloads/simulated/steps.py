"""The steps of a simulated engine: scheduled by the engine's scheduler, noted, and not computed.

`SeparateSteps` are those of an engine that keeps prompts and decodes apart.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import ClassVar, cast

from compiled_attn.cache.blocks import BlockPool
from compiled_attn.engine.request_state import RequestState
from compiled_attn.engine.scheduler import ScheduledStep, ScheduledTokens, Scheduler
from compiled_attn.workloads.simulated.engine import CountedTokens, SimulatedEngine
from compiled_attn.workloads.simulated.pool import SimulatedPool

__all__ = ["SeparateSteps", "SimulatedSteps"]


class SimulatedSteps:
    """A run of the simulated engine, step by step; a subclass may schedule and note others.

    ``axes`` are those of the needs that are noted, by family.
    """

    axes: ClassVar[dict[str, tuple[str, ...]]] = {
        "engine": ("tokens", "shared", "unique", "logits"),
        "table": ("tokens", "requests"),
    }
    scheduler_type: ClassVar[type[Scheduler]] = Scheduler

    def __init__(self, engine: SimulatedEngine) -> None:
        self.engine = engine
        self.pool = SimulatedPool(engine.blocks, engine.block_size)
        self.scheduler = self.scheduler_type(
            cast("BlockPool", self.pool), engine.max_tokens, engine.max_seqs
        )
        self.needs: dict[str, list[tuple[int, ...]]] = {name: [] for name in self.axes}
        self.seconds = 0.0

    def serve(self, queue: deque[tuple[float, RequestState]], limit: int) -> None:
        """Run until every sequence has finished, at most ``limit`` of them at the same time."""
        now, offered, finished, total = 0.0, 0, 0, len(queue)
        while finished < total:
            while queue and queue[0][0] <= now and offered - finished < limit:
                self.scheduler.add(queue.popleft()[1])
                offered += 1
            if offered == finished:
                now = queue[0][0]
                continue
            if step := self.scheduler.schedule():
                seconds = self.note(step)
                finished += self._compute(step)
                now += seconds
                self.seconds += seconds

    def note(self, step: Sequence[ScheduledTokens]) -> float:
        """Note what a step needs; returns its seconds."""
        time, size = self.engine.time, self.engine.block_size
        tokens = sum(part.count for part in step)
        shared, unique = self.blocks_read(step)
        self.needs["engine"].append((tokens, shared, unique, len(step)))
        self.needs["table"].append((tokens, len(step)))
        pairs = time.pair * tokens * (tokens + shared * size)
        return time.base + time.token * tokens + pairs + time.block_slot * size * unique

    def blocks_read(self, step: Sequence[ScheduledTokens]) -> tuple[int, int]:
        """Shared and unique blocks; a prompt's chunk of one token reads as a decode does."""
        pool, context, once = self.pool, [], []
        for part in step:
            sequence = part.sequence
            if part.count == 1:
                pool.read(sequence.request_id)
                if not part.needs_logits:
                    once.append(sequence.request_id)
            elif sequence.computed:
                blocks = pool.tables[sequence.request_id].blocks
                context += blocks[: -(-sequence.computed // pool.block_size)]
        found = pool.counts(context)
        for request_id in once:
            pool.unread(request_id)
        return found

    def _compute(self, step: ScheduledStep) -> int:
        """Every sequence whose tokens are all computed gets one more; returns how many ended."""
        sampled = [part.sequence for part in step if part.needs_logits]
        self.scheduler.commit(step)
        ended = 0
        for sequence in sampled:
            cast("CountedTokens", sequence.tokens).length += 1
            if sequence.generated == sequence.sampling.max_new_tokens:
                self.scheduler.finish(sequence)
                ended += 1
        return ended


class OneKind(Scheduler):
    """One prompt's chunk, or else all decodes."""

    prefills = False

    def schedule(self, ending: Collection[RequestState] = ()) -> ScheduledStep:
        """The next chunk, or else all decodes; a prompt is admitted as soon as there is room."""
        step: dict[RequestState, int] = {}
        self.changed = []
        started = [sequence for sequence in self.running if sequence.remaining > 1]
        if not started and len(self.running) < (limit := self.max_seqs):
            self.max_seqs = len(self.running) + 1
            self._admit(step, self.max_tokens, 0)
            self.max_seqs = limit
        self.prefills = bool(started or step)
        for sequence in started[:1] if started else [*self.running] if not step else []:
            self._add_tokens(sequence, step, self.max_tokens)
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
