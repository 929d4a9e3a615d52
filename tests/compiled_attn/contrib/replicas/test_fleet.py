"""The state of replicas as the frontend polls it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("ray.serve", reason="needs the extra 'ray'")
pytest.importorskip("openai", reason="needs the extra 'serve'")

from ray.exceptions import ActorDiedError

from compiled_attn.contrib.replicas import fleet as module
from compiled_attn.contrib.replicas.fleet import Fleet
from compiled_attn.contrib.replicas.replica import State


class Handle:
    """Replicas whose answers a test sets."""

    def __init__(self, *answers: Any) -> None:
        self.answers: Sequence[Any] = answers

    def options(self, **_: Any) -> Handle:
        return self

    def broadcast(self, method: str) -> Handle:
        return self

    async def results_async(self, *, return_exceptions: bool) -> Sequence[Any]:
        assert return_exceptions
        return self.answers


async def seen(fleet: Fleet, stage: str) -> None:
    async with asyncio.timeout(30):
        while fleet.stage != stage:
            await asyncio.sleep(0.01)


def test_a_replica_that_has_died_hides_no_other_and_comes_back(monkeypatch):
    monkeypatch.setattr(module, "_failure", lambda handle: None)
    reported: list[str] = []

    async def scene() -> None:
        handle = Handle()
        fleet = Fleet(handle, 2, reported.append)
        watching = asyncio.create_task(fleet.watch(lambda: None))
        handle.answers = [State(1, 11)]
        await seen(fleet, "ready, 1 of 2 replicas")
        assert [each.stage for each in fleet.members] == ["starting", "ready"]
        handle.answers = [State(0, 10), State(1, 11)]
        await seen(fleet, "ready, 2 of 2 replicas")
        handle.answers = [State(0, 10), ActorDiedError()]
        await seen(fleet, "ready, 1 of 2 replicas")
        assert fleet.members[1].stage == "restarting"
        handle.answers = [State(0, 10), State(1, 12)]
        await seen(fleet, "ready, 2 of 2 replicas")
        assert [each.restarts for each in fleet.members] == [0, 1]
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching

    asyncio.run(scene())
    assert reported == [f"ready, {ready} of 2 replicas" for ready in (1, 2, 1, 2)]


def test_a_front_that_cannot_see_its_replicas_ends():
    failed: list[bool] = []
    fleet = Fleet(Handle(None), 2, lambda reported: None)  # no state
    asyncio.run(fleet.watch(lambda: failed.append(True)))
    assert failed and "cannot ask the replicas: AttributeError" in fleet.error


def test_it_ends_when_serve_has_given_up(monkeypatch):
    monkeypatch.setattr(module, "_failure", lambda handle: "no such model")
    failed: list[bool] = []
    fleet = Fleet(Handle(), 1, lambda reported: None)
    asyncio.run(fleet.watch(lambda: failed.append(True)))
    assert failed and fleet.error == "no such model" and fleet.stage == "starting, 0 of 1 replicas"
