"""The scheduler: it decides which tokens of which sequences the next step computes.

Continuous batching with chunked prefill: decodes first, then the rest of started prompts, then new
ones, until the step's token budget is full. When blocks run out, the newest running sequence gives
up its blocks and is computed again later (vLLM's recompute preemption; Orca's iteration-level
scheduling).
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import NamedTuple, overload

from compiled_attn.cache.blocks import BlockPool
from compiled_attn.cache.blocks.prefix import PromptKeys
from compiled_attn.engine.request_state import RequestState, Status

__all__ = ["ScheduledStep", "ScheduledTokens", "Scheduler"]


class ScheduledTokens(NamedTuple):
    """The ``count`` tokens of a sequence from ``start`` on."""

    sequence: RequestState
    count: int  # type: ignore[assignment]  # not the method of a tuple
    start: int

    @property
    def tokens(self) -> list[int]:
        """Their ids; 0 for the one that the step before is still computing."""
        return self.sequence.tokens[self.start : self.start + self.count] or [0]

    @property
    def wants_logits(self) -> bool:
        """Whether they reach the last known token, so that the next one can be sampled."""
        return self.start + self.count >= len(self.sequence.tokens)

    @property
    def generated(self) -> int:
        """Tokens that the sequence has generated before the one after these."""
        return max(0, self.start + self.count - self.sequence.prompt_len)


class ScheduledStep(Sequence[ScheduledTokens]):
    """What a step computes: the next tokens of some sequences, of each so many.

    Args:
        counts: for each sequence how many of its uncomputed tokens, in the order of the step.
        starts: where these begin; None: behind what is computed now.
    """

    def __init__(
        self, counts: Mapping[RequestState, int], starts: Sequence[int] | None = None
    ) -> None:
        self.sequences, self.counts = [*counts], [*counts.values()]
        self.starts = [each.computed for each in counts] if starts is None else [*starts]

    def __len__(self) -> int:
        return len(self.sequences)

    def __iter__(self) -> Iterator[ScheduledTokens]:
        return map(ScheduledTokens, self.sequences, self.counts, self.starts)

    @overload
    def __getitem__(self, at: int) -> ScheduledTokens: ...
    @overload
    def __getitem__(self, at: slice) -> ScheduledStep: ...
    def __getitem__(self, at: int | slice) -> ScheduledTokens | ScheduledStep:
        if isinstance(at, slice):
            kept = zip(self.sequences[at], self.counts[at], strict=True)
            return ScheduledStep(dict(kept), self.starts[at])
        return ScheduledTokens(self.sequences[at], self.counts[at], self.starts[at])

    @cached_property
    def special(self) -> list[int]:
        """Places of sequences that want more than the most likely token."""
        return [at for at, sequence in enumerate(self.sequences) if not sequence.is_plain]

    @property
    def is_ahead(self) -> bool:
        """Whether it computes tokens that the step before has not told yet."""
        return any(
            start == len(each.tokens)
            for each, start in zip(self.sequences, self.starts, strict=True)
        )

    def tokens(self) -> list[int]:
        """Ids of all tokens that it computes, see `ScheduledTokens.tokens`."""
        if max(self.counts) == 1:
            starts = zip(self.sequences, self.starts, strict=True)
            with contextlib.suppress(IndexError):  # of one that is not known yet
                return [each.tokens[start] for each, start in starts]
        return [*chain.from_iterable(part.tokens for part in self)]

    def without(self, gone: Container[RequestState]) -> ScheduledStep:
        """The step without some sequences."""
        kept = [part for part in self if part.sequence not in gone]
        counts = {part.sequence: part.count for part in kept}
        return ScheduledStep(counts, [part.start for part in kept])


class Scheduler:
    """Decides each step from the waiting and running sequences and the free blocks.

    Sequences are served in the order of their ids: those that run come before those that wait.

    Args:
        pool: where sequences get their blocks; the scheduler is its only user.
        max_tokens: tokens in a step at most.
        max_seqs: sequences that run at the same time at most.

    Attributes:
        waiting, running: the sequences, in order.
        changed: ids of requests whose blocks the last step changed; those of others are as before.
        preemptions: how many there were.
    """

    def __init__(self, pool: BlockPool, max_tokens: int, max_seqs: int) -> None:
        self.pool = pool
        self.max_tokens = max_tokens
        self.max_seqs = max_seqs
        self.waiting: deque[RequestState] = deque()
        self.running: list[RequestState] = []
        self.changed: list[int] = []
        self.preemptions = 0
        self._head: tuple[RequestState, int, PromptKeys] | None = None

    @property
    def has_work(self) -> bool:
        """Whether any sequence waits or runs."""
        return bool(self.waiting or self.running)

    def add(self, sequence: RequestState) -> None:
        """Puts a new sequence at the end of the queue."""
        self.waiting.append(sequence)

    def knows(self, count: int) -> bool:
        """Whether it has so many sequences."""
        return len(self.waiting) + len(self.running) == count

    def discard(self, sequence: RequestState) -> None:
        """Takes a sequence out of the queue, if it is there."""
        self.waiting = deque(other for other in self.waiting if other is not sequence)

    def restart(self, pool: BlockPool, sequences: Iterable[RequestState]) -> None:
        """Lets these sequences wait, with nothing computed, for the blocks of another pool.

        Whatever state an exception left this in, it is right afterwards, and so is a second call.
        """
        ordered = sorted(sequences, key=lambda sequence: sequence.request_id)
        for sequence in ordered:
            sequence.wait()
        self._head = None  # its keys are those of the pool
        self.pool, self.running, self.waiting = pool, [], deque(ordered)

    @property
    def can_look_ahead(self) -> bool:
        """Whether a step has blocks for sure, so that none of those who wait for tokens loses its
        own."""
        ahead = (len(each.tokens) - each.computed - 1 for each in self.running)
        prompts = self.max_tokens if self.waiting else min(self.max_tokens, sum(ahead))
        most = len(self.running) + prompts // self.pool.block_size + 1
        return self.pool.available >= most

    def advance(self, step: ScheduledStep) -> set[RequestState]:
        """Takes a step for computed whose tokens are not there yet, so that `schedule` can go on
        behind it; returns the sequences that it ends for sure, which need nothing more.
        """
        for sequence, start, count in zip(step.sequences, step.starts, step.counts, strict=True):
            if sequence.status is Status.RUNNING:
                sequence.computed = start + count
        return {
            part.sequence
            for part in step
            if part.wants_logits and part.generated + 1 >= part.sequence.sampling.max_new_tokens
        }

    def schedule(self, ending: Collection[RequestState] = ()) -> ScheduledStep:
        """The next step; blocks for its tokens are reserved. Empty only if there is no work.

        Args:
            ending: running sequences that need nothing more.
        """
        step: dict[RequestState, int] = {}
        late: list[RequestState] = []
        before, room, extra = self.preemptions, self.max_tokens, 0
        self.changed = []
        running = [*self.running]
        for sequence in [each for each in running if each not in ending] if ending else running:
            if len(sequence.tokens) - sequence.computed > 1:
                late.append(sequence)  # behind the decodes
            elif room and sequence.computed < sequence.reserved:
                step[sequence] = 1
                room -= 1
            else:
                room -= self._place(sequence, step, room)
        for sequence in late:
            room -= self._place(sequence, step, room, extra)
            extra += _extra_rows(sequence, step.get(sequence, 1))
        if self.preemptions == before:
            self._admit(step, room, extra)
        return ScheduledStep(step)

    def commit(self, step: ScheduledStep) -> None:
        """Declares a step computed, whose tokens are told: full blocks of its sequences can be
        shared from now on."""
        for sequence, start, count in zip(step.sequences, step.starts, step.counts, strict=True):
            computed = start + count
            if sequence.computed < computed:  # the next step may have begun behind it
                sequence.computed = computed
            if computed >= sequence.quiet_below:
                sequence.quiet_below = self.pool.commit(
                    sequence.request_id, sequence.tokens, computed
                )

    def finish(self, sequence: RequestState, *, sound_blocks: int | None = None) -> None:
        """Takes a sequence out, running or waiting, and frees its blocks.

        Args:
            sequence: the sequence.
            sound_blocks: how many of its first blocks hold what later prompts may find; None: all.
        """
        if sequence.status is Status.RUNNING:
            if sound_blocks is not None:
                self.pool.withdraw(sequence.request_id, sound_blocks)
            self.running.remove(sequence)
            self.pool.free(sequence.request_id)
        else:
            self._head = None
            self.waiting.remove(sequence)
        sequence.status = Status.FINISHED

    def _place(
        self, sequence: RequestState, step: dict[RequestState, int], room: int, extra: int = 0
    ) -> int:
        """Puts what there is room for of a sequence that still runs into a step.

        As long as blocks lack, the newest sequence is preempted, maybe this one. Returns how much
        room it took, less what sequences that left the step gave back.
        """
        others = len(self.running) - 1 + bool(self.waiting)  # a row is left to a newcomer
        count, taken = self._count(sequence, room, others + extra), 0
        if not count or sequence.status is not Status.RUNNING:
            return 0
        whole = self._whole_blocks(sequence.computed + count)
        while whole > sequence.reserved:
            if self.pool.try_reserve(sequence.request_id, whole):
                sequence.reserved = whole
                self.changed.append(sequence.request_id)
                break
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return taken
            taken -= step.pop(victim, 0)
        step[sequence] = count
        return taken + count

    def _count(self, sequence: RequestState, room: int, rows: int) -> int:
        """How many tokens of a sequence a step takes: a prompt that is scored needs logits of all,
        and a step has as many rows of logits as sequences can run, of which others have ``rows``.
        """
        most = max(1, self.max_seqs - rows) if sequence.scores_prompt else room
        return min(sequence.remaining, room, most)

    def _whole_blocks(self, length: int) -> int:
        """The positions of the blocks that so many take: a decode asks the pool once a block."""
        return -(-length // self.pool.block_size) * self.pool.block_size

    def _preempt(self, sequence: RequestState) -> None:
        self.pool.preempt(sequence.request_id)
        self.changed = [each for each in self.changed if each != sequence.request_id]
        self.running.remove(sequence)
        sequence.wait()
        self.waiting.appendleft(sequence)
        self.preemptions += 1

    def _admit(self, step: dict[RequestState, int], room: int, extra: int) -> None:
        while self.waiting and (rows := len(self.running) + extra) < self.max_seqs:
            sequence = self.waiting[0]
            if room < 1:
                return
            prompt = None if sequence.scores_prompt else self._prompt(sequence)
            if not self._has_blocks(sequence, prompt):
                return
            table = self.pool.add(sequence.request_id, prompt, salt=sequence.salt)
            sequence.computed = table.num_cached_tokens
            if sequence.cached is None:
                sequence.cached = sequence.computed
                sequence.begun_s = time.perf_counter()
            count = self._count(sequence, room, rows)
            sequence.reserved = self._whole_blocks(sequence.computed + count)
            self.pool.reserve(sequence.request_id, sequence.reserved)
            self.changed.append(sequence.request_id)
            self.waiting.popleft()
            self._head = None
            self.running.append(sequence)
            sequence.status = Status.RUNNING
            step[sequence] = count
            room -= count
            extra += _extra_rows(sequence, count)

    def _prompt(self, sequence: RequestState) -> PromptKeys:
        """The tokens of the head of the queue, which are hashed once while it waits."""
        head, length = self._head, len(sequence.tokens)
        if head is not None and head[0] is sequence and head[1] == length:
            return head[2]
        prompt = self.pool.prompt(sequence.tokens, salt=sequence.salt)
        self._head = sequence, length, prompt
        return prompt

    def _has_blocks(self, sequence: RequestState, prompt: PromptKeys | None) -> bool:
        # One block for each running sequence stays free, or the next step would preempt again.
        spare = len(self.running) * self.pool.block_size
        length = len(sequence.tokens) + spare
        return self.pool.can_allocate(length, prompt, salt=sequence.salt)


def _extra_rows(sequence: RequestState, count: int) -> int:
    """Rows of logits that so many tokens of a sequence need beyond the one that each has."""
    return count - 1 if sequence.scores_prompt else 0
