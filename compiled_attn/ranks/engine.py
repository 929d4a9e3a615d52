"""An engine on several ranks: rank 0 takes requests, and all ranks plan and compute each step."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass
from typing import Any

from compiled_attn.cache.blocks.prefix import Salt
from compiled_attn.engine import Engine, SamplingParams
from compiled_attn.engine.request_state import RequestState, TokenEvent
from compiled_attn.errors import EngineStopped
from compiled_attn.ranks.group import Ranks

__all__ = ["RankEngine"]


@dataclass(frozen=True, slots=True)
class _Entered:
    request_id: int
    prompt: list[int]
    sampling: SamplingParams
    salt: Salt


@dataclass(frozen=True, slots=True)
class _Dropped:
    request_id: int


class RankEngine(Engine):
    """An engine that leads others, or follows.

    Requests and aborts come to rank 0, which tells them to the others before the next step, in
    order; seeds that were drawn go with them. A scheduler decides by requests and blocks alone, so
    all ranks plan the same step, and in strict mode they compare it.

    An exception in a step ends the engine, as its ranks could no longer agree.

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
        self._is_torn = False

    def follow(self) -> None:
        """Computes what rank 0 plans, until that is done with it.

        Raises:
            RankLost: a rank has ended.
            RanksDisagree: this rank would compute another step (strict).
        """
        while (changes := self.ranks.tell(None)) is not None:
            for each in changes:
                self._follow(each)
            self.advance()
            self._events.clear()

    def dismiss(self) -> None:
        """Ends `follow` on the other ranks; rank 0 has no more steps."""
        if self.ranks.leads:
            self.ranks.tell(None)

    def _follow(self, change: _Entered | _Dropped) -> None:
        if isinstance(change, _Dropped):
            self.abort(change.request_id)
        else:
            self._ids = itertools.count(change.request_id)
            self.submit(change.prompt, change.sampling, salt=change.salt)

    def enter(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        salt: Salt,
        arrived_s: float | None,
        events: deque[TokenEvent],
        name: tuple[int, int] | None,
    ) -> int:
        """See `Engine.enter`."""
        request_id = super().enter(prompt, sampling, salt, arrived_s, events, name)
        self._said.append(_Entered(request_id, prompt, self._requests[request_id].sampling, salt))
        return request_id

    def _drop(self, sequence: RequestState) -> None:
        super()._drop(sequence)
        request_id = sequence.request_id
        told = [each for each in self._said if each.request_id != request_id]
        # One that came since the last step was told to nobody.
        self._said = told if len(told) < len(self._said) else [*told, _Dropped(request_id)]

    def _run_step(self) -> None:
        if self._is_torn:
            raise EngineStopped(
                "expected an engine whose ranks agree, got one in which an exception ended a step: "
                "start all ranks again"
            )
        self._is_torn = True
        if self.ranks.leads:
            self.ranks.tell(self._said)
        self._said = []
        super()._run_step()
        self._is_torn = False
