"""An engine on several ranks: rank 0 takes requests, and all ranks plan and compute each step."""

from __future__ import annotations

import zlib
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from compiled_attn.cache.blocks.prefix import Salt
from compiled_attn.engine import Engine, SamplingParams
from compiled_attn.engine.outcome import Attempt, Outcome
from compiled_attn.engine.sequence import Mailbox, Sequence, TokenEvent
from compiled_attn.errors import RanksDisagree
from compiled_attn.ranks.group import Ranks

__all__ = ["RankEngine"]


@dataclass(frozen=True, slots=True)
class _Entered:
    prompt: list[int]
    sampling: SamplingParams
    salt: Salt


@dataclass(frozen=True, slots=True)
class _Dropped:
    request_id: int


@dataclass(frozen=True, slots=True)
class _Step:
    """What came before a step, in order, and the sum of the step before."""

    before: list[_Entered | _Dropped]
    past: int


class RankEngine(Engine):
    """An engine that leads others, or follows.

    Requests and aborts come to rank 0, which tells them to the others before the next step, in
    order; seeds that were drawn go with them. A scheduler decides by requests and blocks alone, so
    all ranks plan the same step. Each checks that its step before was that of rank 0: the same
    tokens of the same requests.

    An exception in a step ends the engine on all ranks, as they could no longer agree.

    Args:
        ranks: who takes part.
        args, kwargs: as of `Engine`; the executor is that of a model that was cut by `shard`, and
            the sizes are the same on all ranks.

    Raises:
        ConfigError: another rank has another model, other settings or versions.
    """

    def __init__(self, ranks: Ranks, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ranks = ranks
        self._said: list[_Entered | _Dropped] = []
        self._past = 0

    def follow(self) -> None:
        """Computes what rank 0 plans, until that is done with it.

        Raises:
            RankLost: a rank has ended.
            RanksDisagree: a step of this rank was another than that of rank 0.
        """
        while (told := self.ranks.tell(None)) is not None:
            if told.past != self._past:
                raise RanksDisagree(
                    f"expected the step {self.tally.count('steps') - 1} of rank 0, got another one "
                    f"on rank {self.ranks.rank}: this is a bug of compiled-attn, please report it"
                )
            for each in told.before:
                self._follow(each)
            self._advance()
            self._mailbox.hand_out()
            self._mailbox.arrived()

    def dismiss(self) -> None:
        """Ends `follow` on the other ranks; rank 0 has no more steps."""
        if self.ranks.leads:
            self.ranks.tell(None)

    def _follow(self, change: _Entered | _Dropped) -> None:
        if isinstance(change, _Dropped):
            self.abort(change.request_id)
        else:
            self.submit(change.prompt, change.sampling, salt=change.salt)

    def _enter(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        salt: Salt,
        arrived_s: float | None,
        mailbox: Mailbox[TokenEvent],
        index: int | None,
        choice: int = 0,
    ) -> int:
        request_id = super()._enter(prompt, sampling, salt, arrived_s, mailbox, index, choice)
        self._said.append(_Entered(prompt, self._requests[request_id].sampling, salt))
        return request_id

    def _drop(self, sequence: Sequence, attempt: Attempt) -> None:
        super()._drop(sequence, attempt)
        self._said.append(_Dropped(sequence.request_id))

    def _compute(self, attempt: Attempt) -> None:
        if self.ranks.leads:
            self.ranks.tell(_Step(self._said, self._past))
        self._said = []
        with self.ranks.calling():
            super()._compute(attempt)
        assert attempt.outcome is not None
        self._past = _sum_of(attempt.outcome, self.pool.places.num_used)


def _sum_of(outcome: Outcome, blocks: int) -> int:
    """Of what a step computed and what came of it."""
    parts = [(part.sequence.request_id, part.start, part.count) for part in outcome.computed]
    tokens: list[Hashable] = [(each.request_id, at, token) for each, at, token in outcome.tokens]
    return zlib.crc32(repr((outcome.number, parts, tokens, blocks)).encode())
