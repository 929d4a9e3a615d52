"""The scheduler: decides which tokens of which sequences the next step computes.

Continuous batching with chunked prefill: decodes first, then the rest of started prompts, then new
ones, until the step's token budget is full. When blocks run out, the newest running sequence loses
its blocks and is computed again later (vLLM's recompute preemption; Orca's iteration-level
scheduling).
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, islice
from typing import NamedTuple, overload

from compiled_attn.cache.blocks import BlockPool
from compiled_attn.cache.blocks.prefix import PromptKeys
from compiled_attn.cache.blocks.window import most_held
from compiled_attn.engine.request_state import RequestState, Status
from compiled_attn.engine.speculation.drafter import Drafter

__all__ = ["ScheduledStep", "ScheduledTokens", "Scheduler"]


class ScheduledTokens(NamedTuple):
    """``count`` tokens of a sequence, from ``start`` on; the last of them may be a draft."""

    sequence: RequestState
    count: int  # type: ignore[assignment]  # not the method of a tuple
    start: int
    draft: Sequence[int] = ()

    @property
    def tokens(self) -> list[int]:
        """Their ids; 0 for one that the previous step is still computing."""
        known = self.sequence.tokens[self.start : self.start + self.count] or [0]
        return [*known, *self.draft] if self.draft else known

    @property
    def needs_logits(self) -> bool:
        """Whether they reach the last known token, so that the next one can be sampled."""
        return self.start + self.count >= len(self.sequence.tokens)

    @property
    def generated(self) -> int:
        """Tokens generated before the one that follows these, without the draft."""
        return max(0, self.start + self.count - len(self.draft) - self.sequence.prompt_len)


class ScheduledStep(Sequence[ScheduledTokens]):
    """The tokens that a step computes.

    Args:
        counts: how many of each sequence, those of its draft included.
        starts: position of the first of these; None: after the computed ones.
        drafts: of some of the sequences, each of which computes its last token before.
    """

    def __init__(
        self,
        counts: Mapping[RequestState, int],
        starts: Sequence[int] | None = None,
        drafts: Mapping[RequestState, Sequence[int]] | None = None,
    ) -> None:
        self.sequences, self.counts = [*counts], [*counts.values()]
        self.starts = [each.computed for each in counts] if starts is None else [*starts]
        self.drafts: Mapping[RequestState, Sequence[int]] = drafts or {}

    def __len__(self) -> int:
        return len(self.sequences)

    def __iter__(self) -> Iterator[ScheduledTokens]:
        parts = self.sequences, self.counts, self.starts
        if not self.drafts:
            return map(ScheduledTokens, *parts)
        drafts = (self.drafts.get(each, ()) for each in self.sequences)
        return map(ScheduledTokens, *parts, drafts)

    @overload
    def __getitem__(self, at: int) -> ScheduledTokens: ...
    @overload
    def __getitem__(self, at: slice) -> ScheduledStep: ...
    def __getitem__(self, at: int | slice) -> ScheduledTokens | ScheduledStep:
        if isinstance(at, slice):
            counts = zip(self.sequences[at], self.counts[at], strict=True)
            return ScheduledStep(dict(counts), self.starts[at], self.drafts)
        sequence = self.sequences[at]
        draft = self.drafts.get(sequence, ())
        return ScheduledTokens(sequence, self.counts[at], self.starts[at], draft)

    @cached_property
    def special(self) -> list[int]:
        """Rows of sequences that want more than the most likely token."""
        return [at for at, sequence in enumerate(self.sequences) if not sequence.is_plain]

    @property
    def is_ahead(self) -> bool:
        """Whether it computes tokens that the previous step has not returned yet."""
        return any(
            start == len(each.tokens)
            for each, start in zip(self.sequences, self.starts, strict=True)
        )

    def tokens(self) -> list[int]:
        """Ids of all tokens, see `ScheduledTokens.tokens`."""
        if max(self.counts) == 1:
            starts = zip(self.sequences, self.starts, strict=True)
            with contextlib.suppress(IndexError):  # a token is not known yet
                return [each.tokens[start] for each, start in starts]
        return [*chain.from_iterable(part.tokens for part in self)]

    def without(self, gone: Container[RequestState]) -> ScheduledStep:
        """Returns the step without some sequences."""
        rest = [part for part in self if part.sequence not in gone]
        counts = {part.sequence: part.count for part in rest}
        return ScheduledStep(counts, [part.start for part in rest], self.drafts)

    def without_drafts(self) -> ScheduledStep:
        """Returns the step without its drafts."""
        counts = {part.sequence: part.count - len(part.draft) for part in self}
        return ScheduledStep(counts, self.starts)


class Scheduler:
    """Decides each step from the waiting and running sequences and the free blocks.

    Sequences are served in the order of their ids: running ones precede waiting ones.

    Args:
        drafter: makes drafts for requests that decode; None: there are none.

    Attributes:
        waiting, running: the sequences, in order.
        changed: ids of requests whose blocks changed in the last `schedule`.
        preemptions: how many there were.
    """

    def __init__(
        self, pool: BlockPool, max_tokens: int, max_seqs: int, drafter: Drafter | None = None
    ) -> None:
        self.pool = pool
        self.max_tokens = max_tokens
        self.max_seqs = max_seqs
        self.waiting: deque[RequestState] = deque()
        self.running: list[RequestState] = []
        self.changed: list[int] = []
        self.preemptions = 0
        self.drafter = drafter
        self._head: tuple[RequestState, int, PromptKeys] | None = None

    @property
    def has_work(self) -> bool:
        """Whether any sequence waits or runs."""
        return bool(self.waiting or self.running)

    def add(self, sequence: RequestState) -> None:
        """Puts a new sequence at the end of the queue."""
        self.waiting.append(sequence)

    def restart(self, pool: BlockPool, sequences: Iterable[RequestState]) -> None:
        """Queues these sequences, with nothing computed, for the blocks of another pool.

        Works in whatever state an exception left the scheduler.
        """
        ordered = sorted(sequences, key=lambda sequence: sequence.request_id)
        for sequence in ordered:
            sequence.wait()
        self._head = None  # its keys belong to the pool
        self.pool, self.running, self.waiting = pool, [], deque(ordered)

    @property
    def can_schedule_ahead(self) -> bool:
        """Whether the next step surely has blocks, so that no sequence is preempted while its token
        is unknown."""
        ahead = (len(each.tokens) - each.computed - 1 for each in self.running)
        prompts = self.max_tokens if self.waiting else min(self.max_tokens, sum(ahead))
        most = len(self.running) + prompts // self.pool.block_size + 1
        return self.pool.available >= most

    def advance(self, step: ScheduledStep) -> set[RequestState]:
        """Counts a launched step as computed, so that `schedule` can plan the next one; returns the
        sequences that it surely finishes.
        """
        for sequence, start, count in zip(step.sequences, step.starts, step.counts, strict=True):
            if sequence.status is Status.RUNNING:
                sequence.computed = start + count
        return {
            part.sequence
            for part in step
            if part.needs_logits and part.generated + 1 >= part.sequence.sampling.max_new_tokens
        }

    def schedule(self, ending: Collection[RequestState] = ()) -> ScheduledStep:
        """Schedules the next step and reserves its blocks. Empty only if there is no work.

        Args:
            ending: running sequences that a launched step finishes.
        """
        step: dict[RequestState, int] = {}
        late: list[RequestState] = []
        before, room, extra = self.preemptions, self.max_tokens, 0
        self.changed = []
        running = [*self.running]
        for sequence in [each for each in running if each not in ending] if ending else running:
            if len(sequence.tokens) - sequence.computed > 1:
                late.append(sequence)  # after the decodes
            elif room and sequence.computed < sequence.reserved:
                step[sequence] = 1
                room -= 1
            else:
                room -= self._add_tokens(sequence, step, room)
        drafts: Mapping[RequestState, Sequence[int]] = {}
        if self.drafter is not None and step:
            drafts = self.drafter.draft([*step], self._most_drafts(late, room))
            drafted = sum(map(len, drafts.values()))
            room -= drafted  # which the prompts leave
            extra += drafted
        for sequence in late:
            room -= self._add_tokens(sequence, step, room, extra)
            extra += _extra_rows(sequence, step.get(sequence, 1))
        if self.preemptions == before:
            self._admit(step, room, extra)
        return ScheduledStep(step, drafts=self._add_drafts(drafts, step))

    def commit(self, step: ScheduledStep) -> None:
        """Lets later prompts share the full blocks of a step whose tokens were appended."""
        for sequence, start, count in zip(step.sequences, step.starts, step.counts, strict=True):
            computed = start + count
            if step.drafts:  # of which only accepted tokens are in the text
                computed = min(computed, len(sequence.tokens) - 1)
            if sequence.computed < computed:  # the next step may already be launched
                sequence.computed = computed
            if computed >= sequence.commit_from:
                sequence.commit_from = self.pool.commit(
                    sequence.request_id, sequence.tokens, computed
                )
                if (window := self.pool.released_window) is not None:
                    self._release(sequence, computed, window - 1)

    def _release(self, sequence: RequestState, computed: int, before: int) -> None:
        """Releases the blocks that neither the next step, which may be launched, nor a later one
        reads: a token sees ``before`` others.
        """
        first = max(0, computed - before)
        following = self.pool.release_before(sequence.request_id, first) + before
        sequence.commit_from = min(sequence.commit_from, following)

    def finish(self, sequence: RequestState, *, has_failed: bool = False) -> None:
        """Removes a sequence, running or waiting, and frees its blocks.

        Args:
            has_failed: later prompts share none of its blocks, not even those that it found.
        """
        if sequence.status is Status.RUNNING:
            if has_failed:
                self.pool.withdraw(sequence.request_id, 0)
            self.running.remove(sequence)
            self.pool.free(sequence.request_id)
        else:
            self._head = None
            self.waiting.remove(sequence)
        sequence.status = Status.FINISHED

    def _add_tokens(
        self, sequence: RequestState, step: dict[RequestState, int], room: int, extra: int = 0
    ) -> int:
        """Adds as many tokens of a running sequence to a step as fit.

        While there are too few blocks, it preempts the newest sequence, maybe this one. Returns the
        room that it took, less what preempted sequences returned.
        """
        others = len(self.running) - 1 + bool(self.waiting)  # leave a row for a new sequence
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
            self.preempt(victim)
            if victim is sequence:
                return taken
            taken -= step.pop(victim, 0)
        step[sequence] = count
        return taken + count

    def _most_drafts(self, late: Sequence[RequestState], room: int) -> int:
        """Counts the tokens of drafts that a step may have.

        Buckets of prompts have rows of logits for ``max_seqs`` sequences: drafts take those that
        are left, except one for a new sequence. A scored prompt takes all.
        """
        spare = self.max_seqs - len(self.running)
        new = [*islice(self.waiting, spare)]
        if not (late or new):
            return room
        if any(each.scores_prompt for each in (*late, *new)):
            return 0
        return min(room - len(late) - len(new), spare - bool(new))

    def _add_drafts(
        self, given: Mapping[RequestState, Sequence[int]], step: dict[RequestState, int]
    ) -> dict[RequestState, Sequence[int]]:
        """Adds drafts to a step, where there are blocks for them."""
        drafts: dict[RequestState, Sequence[int]] = {}
        for sequence, draft in given.items():
            if sequence not in step:  # preempted
                continue
            length = sequence.computed + 1 + len(draft)
            whole = self._whole_blocks(length)
            # A draft preempts nobody, and leaves a block for each running sequence.
            has_spare = length > sequence.reserved and self.pool.available > len(self.running)
            if has_spare and self.pool.try_reserve(sequence.request_id, whole):
                sequence.reserved = whole
                self.changed.append(sequence.request_id)
            if kept := draft[: max(0, sequence.reserved - sequence.computed - 1)]:
                drafts[sequence] = kept
                step[sequence] += len(kept)
        return drafts

    def _count(self, sequence: RequestState, room: int, rows: int) -> int:
        """Counts the tokens of a sequence that fit a step: a scored prompt needs a row of logits
        for each, and others take ``rows`` of the ``max_seqs`` rows of a step.
        """
        most = max(1, self.max_seqs - rows) if sequence.scores_prompt else room
        count = min(remaining := sequence.remaining, room, most)
        if count < 2:
            return count
        start = sequence.computed
        end = self.pool.chunk_end(start, start + count, is_last=count == remaining)
        return end - start

    def _whole_blocks(self, length: int) -> int:
        """Rounds up to whole blocks, so that a decode asks the pool once a block."""
        return -(-length // self.pool.block_size) * self.pool.block_size

    def preempt(self, sequence: RequestState) -> None:
        """Takes the blocks of a running sequence, which is computed again before waiting ones."""
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
        """Hashes the tokens of the head of the queue, once while it waits."""
        head, length = self._head, len(sequence.tokens)
        if head is not None and head[0] is sequence and head[1] == length:
            return head[2]
        prompt = self.pool.prompt(sequence.tokens, salt=sequence.salt)
        self._head = sequence, length, prompt
        return prompt

    def _has_blocks(self, sequence: RequestState, prompt: PromptKeys | None) -> bool:
        # One block for each running sequence stays free, or the next step would preempt again.
        pool, spare, length = self.pool, len(self.running), len(sequence.tokens)
        window, size = pool.released_window, pool.block_size
        at_once = most_held(length, window, self.max_tokens, size) + spare
        length += spare * size
        return pool.can_allocate(length, prompt, salt=sequence.salt, at_once=at_once)


def _extra_rows(sequence: RequestState, count: int) -> int:
    """Rows of logits that ``count`` tokens of a sequence need beyond the one that each has."""
    return count - 1 if sequence.scores_prompt else 0
