"""An engine on several ranks: rank 0 takes requests, all ranks plan and compute each step."""

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
class _Submitted:
    request_id: int
    prompt: list[int]
    sampling: SamplingParams
    salt: Salt


@dataclass(frozen=True, slots=True)
class _Aborted:
    request_id: int


class RankEngine(Engine):
    """An engine that leads the other ranks, or follows rank 0.

    Requests and aborts come to rank 0, which broadcasts them in order before the next step, with
    the seeds it chose. The scheduler depends only on requests and blocks, so every rank computes
    the same global plan; in strict mode they compare it.

    An exception in a step stops the engine, since its ranks could no longer agree. ``args`` and
    ``kwargs`` are those of `Engine`; the executor is a `RankExecutor`.
    """

    def __init__(self, ranks: Ranks, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ranks = ranks
        self._unsent: list[_Submitted | _Aborted] = []
        self._in_step = False

    def follow(self) -> None:
        """Compute the steps of rank 0 until it calls `dismiss`.

        Raises:
            RankLost: a rank exited.
            RanksDisagree: this rank would compute another step (strict).
        """
        while (changes := self.ranks.broadcast(None)) is not None:
            for each in changes:
                self._follow(each)
            self.advance()
            self._events.clear()

    def dismiss(self) -> None:
        """End `follow` on the other ranks."""
        if self.ranks.leads:
            self.ranks.broadcast(None)

    def _follow(self, change: _Submitted | _Aborted) -> None:
        if isinstance(change, _Aborted):
            self.drop({change.request_id})  # whose submission may have been interrupted
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
        self._unsent.append(
            _Submitted(request_id, prompt, self._requests[request_id].sampling, salt)
        )
        return request_id

    def _drop(self, sequence: RequestState) -> None:
        super()._drop(sequence)
        request_id = sequence.request_id
        rest = [each for each in self._unsent if each.request_id != request_id]
        # A request submitted since the last step is unknown to the other ranks.
        self._unsent = rest if len(rest) < len(self._unsent) else [*rest, _Aborted(request_id)]

    def _run_step(self) -> None:
        if self._in_step:
            raise EngineStopped(
                "expected an engine whose ranks agree, got one whose step raised an exception: "
                "start all ranks again"
            )
        self._in_step = True
        if self.ranks.leads:
            self.ranks.broadcast(self._unsent)
        self._unsent = []
        super()._run_step()
        self._in_step = False
