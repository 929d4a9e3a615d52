"""Runs the engine's scheduler and records what each step needs, without computing it."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import ClassVar, cast

from compiled_attn.engine.request_state import RequestState
from compiled_attn.engine.scheduler import ScheduledStep, ScheduledTokens, Scheduler
from compiled_attn.planner.simulator.engine import CountedTokens, SimulatedEngine
from compiled_attn.planner.simulator.pool import CountingPool

__all__ = ["SeparateSteps", "SimulatedSteps"]


class SimulatedSteps:
    """A run of the simulated engine; a subclass may schedule and record other steps.

    ``axes`` are those of the recorded needs, by kind of step.
    """

    axes: ClassVar[dict[str, tuple[str, ...]]] = {
        "engine": ("tokens", "shared", "unique", "logits"),
        "table": ("tokens", "requests"),
    }
    scheduler_type: ClassVar[type[Scheduler]] = Scheduler

    def __init__(self, engine: SimulatedEngine) -> None:
        self.engine = engine
        self.pool = CountingPool(engine.blocks + 1, engine.block_size, engine.window)
        self.scheduler = self.scheduler_type(self.pool, engine.max_tokens, engine.max_seqs)
        self.needs: dict[str, list[tuple[int, ...]]] = {name: [] for name in self.axes}
        self.seconds = 0.0

    def serve(self, queue: deque[tuple[float, RequestState]], limit: int) -> None:
        """Run until every request has finished, with at most ``limit`` at the same time."""
        now, offered, finished, total = 0.0, 0, 0, len(queue)
        while finished < total:
            while queue and queue[0][0] <= now and offered - finished < limit:
                self.scheduler.add(queue.popleft()[1])
                offered += 1
            if offered == finished:
                now = queue[0][0]
                continue
            if step := self.scheduler.schedule():
                seconds = self.record(step)
                finished += self._compute(step)
                now += seconds
                self.seconds += seconds

    def record(self, step: Sequence[ScheduledTokens]) -> float:
        """Record what a step needs; returns its seconds."""
        time, size = self.engine.time, self.engine.block_size
        tokens = sum(part.count for part in step)
        shared, unique = self.blocks_read(step)
        self.needs["engine"].append((tokens, shared, unique, len(step)))
        self.needs["table"].append((tokens, len(step)))
        pairs = time.pair * tokens * (tokens + shared * size)
        return time.base + time.token * tokens + pairs + time.block_slot * size * unique

    def blocks_read(self, step: Sequence[ScheduledTokens]) -> tuple[int, int]:
        """Return shared and unique blocks; a prompt chunk of one token reads like a decode."""
        pool, context, once = self.pool, [], []
        for part in step:
            sequence = part.sequence
            if part.count == 1:
                pool.read(sequence.request_id)
                if not part.needs_logits:
                    once.append(sequence.request_id)
            elif sequence.computed:
                table = pool.table(sequence.request_id)
                end = -(-sequence.computed // pool.block_size)
                context += table.blocks[table.num_released : end]
        found = pool.counts(context)
        for request_id in once:
            pool.unread(request_id)
        return found

    def _compute(self, step: ScheduledStep) -> int:
        """Give each fully computed request a token; returns how many finished."""
        sampled = [part.sequence for part in step if part.needs_logits]
        self.scheduler.commit(step)
        finished = 0
        for sequence in sampled:
            cast("CountedTokens", sequence.tokens).length += 1
            if sequence.generated == sequence.sampling.max_new_tokens:
                self.scheduler.finish(sequence)
                finished += 1
        return finished


class SeparateScheduler(Scheduler):
    """Schedules one prompt chunk, or else all decodes."""

    prefills = False

    def schedule(self, ending: Collection[RequestState] = ()) -> ScheduledStep:
        """Return the next chunk, or else all decodes; admits a prompt as soon as there is room."""
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
    """The steps of an engine that computes prompts and decodes separately."""

    axes: ClassVar = {"decode": ("sequences", "blocks"), "prefill": ("tokens", "context")}
    scheduler_type = SeparateScheduler

    def record(self, step: Sequence[ScheduledTokens]) -> float:
        """Record what a step needs; returns its seconds."""
        time, size = self.engine.time, self.engine.block_size
        if cast("SeparateScheduler", self.scheduler).prefills:
            (part,) = step
            count, context = part.count, part.sequence.computed
            self.needs["prefill"].append((count, -(-context // size)))
            return time.base + time.token * count + time.pair * count * (count + context)
        tokens, blocks = len(step), self.blocks_of_decodes(step)
        self.needs["decode"].append((tokens, blocks))
        return time.base + time.token * tokens + time.block_slot * size * blocks

    def blocks_of_decodes(self, step: Sequence[ScheduledTokens]) -> int:
        """Return the number of distinct blocks that decodes read."""
        return sum(self.blocks_read(step))
