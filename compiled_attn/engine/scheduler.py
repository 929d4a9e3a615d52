"""The scheduler: it decides which tokens of which sequences the next step computes.

Continuous batching with chunked prefill: decodes first, then the rest of started prompts, then new
ones, until the step's token budget is full. When blocks run out, the newest running sequence gives
up its blocks and is computed again later (vLLM's recompute preemption; Orca's iteration-level
scheduling).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from compiled_attn.cache.blocks import BlockPool
from compiled_attn.cache.blocks.prefix import PromptKeys
from compiled_attn.engine.sequence import Sequence, Status

__all__ = ["ScheduledTokens", "Scheduler"]


class ScheduledTokens(NamedTuple):
    """The next ``count`` uncomputed tokens of a sequence."""

    sequence: Sequence
    count: int  # type: ignore[assignment]  # not the method of a tuple

    @property
    def tokens(self) -> list[int]:
        """Their ids."""
        start = self.sequence.computed
        return self.sequence.tokens[start : start + self.count]

    @property
    def wants_logits(self) -> bool:
        """Whether the chunk reaches the last known token, so that the next one can be sampled."""
        return self.count == self.sequence.remaining


class Scheduler:
    """Decides each step from the waiting and running sequences and the free blocks.

    Sequences are served in the order of their ids: those that run come before those that wait.

    Args:
        pool: where sequences get their blocks; the scheduler is its only user.
        max_tokens: tokens in a step at most.
        max_seqs: sequences that run at the same time at most.
    """

    def __init__(self, pool: BlockPool, max_tokens: int, max_seqs: int) -> None:
        self.pool = pool
        self.max_tokens = max_tokens
        self.max_seqs = max_seqs
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0
        self._head: tuple[Sequence, int, PromptKeys] | None = None

    @property
    def has_work(self) -> bool:
        """Whether any sequence waits or runs."""
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        """Puts a new sequence at the end of the queue."""
        self.waiting.append(sequence)

    def knows(self, count: int) -> bool:
        """Whether it has so many sequences."""
        return len(self.waiting) + len(self.running) == count

    def discard(self, sequence: Sequence) -> None:
        """Takes a sequence out of the queue, if it is there."""
        self.waiting = deque(other for other in self.waiting if other is not sequence)

    def restart(self, pool: BlockPool, sequences: Iterable[Sequence]) -> None:
        """Lets these sequences wait, with nothing computed, for the blocks of another pool.

        Whatever state an exception left this in, it is right afterwards, and so is a second call.
        """
        ordered = sorted(sequences, key=lambda sequence: sequence.request_id)
        for sequence in ordered:
            sequence.status, sequence.computed = Status.WAITING, 0
        self._head = None  # its keys are those of the pool
        self.pool, self.running, self.waiting = pool, [], deque(ordered)

    def schedule(self) -> list[ScheduledTokens]:
        """The next step; blocks for its tokens are reserved. Empty only if there is no work."""
        step: dict[Sequence, ScheduledTokens] = {}
        before, room = self.preemptions, self.max_tokens
        for sequence in self._decodes_first():
            count = min(sequence.remaining, room)
            if not count or sequence.status is not Status.RUNNING:
                continue
            while not self.pool.try_reserve(sequence.request_id, sequence.computed + count):
                victim = self.running[-1]
                self._preempt(victim)
                if victim is sequence:
                    break
                if victim in step:
                    room += step.pop(victim).count
            else:
                step[sequence] = ScheduledTokens(sequence, count)
                room -= count
        if self.preemptions == before:
            self._admit(step, room)
        return [*step.values()]

    def commit(self, part: ScheduledTokens) -> None:
        """Declares tokens of a step computed: their full blocks can be shared from now on."""
        sequence = part.sequence
        sequence.computed += part.count
        self.pool.commit(sequence.request_id, sequence.tokens, sequence.computed)

    def finish(self, sequence: Sequence, *, sound_blocks: int | None = None) -> None:
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

    def _decodes_first(self) -> list[Sequence]:
        """Those that run; sequences of one kind in order of admission."""
        return sorted(self.running, key=lambda sequence: sequence.remaining > 1)  # stable

    def _preempt(self, sequence: Sequence) -> None:
        self.pool.preempt(sequence.request_id)
        self.running.remove(sequence)
        sequence.status, sequence.computed = Status.WAITING, 0
        self.waiting.appendleft(sequence)
        self.preemptions += 1

    def _admit(self, step: dict[Sequence, ScheduledTokens], room: int) -> None:
        while self.waiting and len(self.running) < self.max_seqs:
            sequence = self.waiting[0]
            if room < 1:
                return
            prompt = self._prompt(sequence)
            if not self._has_blocks(sequence, prompt):
                return
            table = self.pool.add(sequence.request_id, prompt, salt=sequence.salt)
            sequence.computed = table.num_cached_tokens
            count = min(sequence.remaining, room)
            self.pool.reserve(sequence.request_id, sequence.computed + count)
            self.waiting.popleft()
            self._head = None
            self.running.append(sequence)
            sequence.status = Status.RUNNING
            step[sequence] = ScheduledTokens(sequence, count)
            room -= count

    def _prompt(self, sequence: Sequence) -> PromptKeys:
        """The tokens of the head of the queue, which are hashed once while it waits."""
        head, length = self._head, len(sequence.tokens)
        if head is not None and head[0] is sequence and head[1] == length:
            return head[2]
        prompt = self.pool.prompt(sequence.tokens, salt=sequence.salt)
        self._head = sequence, length, prompt
        return prompt

    def _has_blocks(self, sequence: Sequence, prompt: PromptKeys) -> bool:
        # One block for each running sequence stays free, or the next step would preempt again.
        spare = len(self.running) * self.pool.block_size
        length = len(sequence.tokens) + spare
        return self.pool.can_allocate(length, prompt, salt=sequence.salt)
