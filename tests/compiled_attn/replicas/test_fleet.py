"""The fleet looks after each of its replicas, whatever the others do."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace

import pytest

pytest.importorskip("ray", reason="needs the extra ray")

from compiled_attn.replicas.fleet import Fleet
from compiled_attn.replicas.replica import State


class Actor:
    """Says that it is ready, or says nothing, as one that Ray has no room for."""

    def __init__(self, *, answers: bool) -> None:
        self.state = SimpleNamespace(remote=self._state)
        self._answers = answers

    async def _state(self) -> State:
        if not self._answers:
            await asyncio.Event().wait()
        return State(7, "ready", None)


async def until(holds) -> None:
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0.01)


def test_a_replica_comes_back_while_another_one_waits_for_room():
    async def scene() -> None:
        actors = iter([Actor(answers=True), Actor(answers=False)])
        fleet = Fleet(lambda: next(actors), 2, lambda told: None)
        watching = asyncio.create_task(fleet.watch(lambda: None))
        first, second = fleet.members
        await until(lambda: first.stage == "ready" and second.stage == "starting")
        fleet.lost(first)
        assert not fleet.ready
        await until(lambda: fleet.ready == [first])
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching

    asyncio.run(scene())
