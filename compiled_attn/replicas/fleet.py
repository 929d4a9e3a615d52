"""The fleet: actors of Ray, which of them are ready, and the router that knows these."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayActorError

from compiled_attn.replicas.replica import State
from compiled_attn.replicas.router import PrefixRouter, Route

__all__ = ["Fleet", "Member"]

_LOOK_EVERY = 0.25  # seconds


@dataclass
class Member:
    """One replica.

    Attributes:
        number: its label in figures.
        actor: of Ray; None: not started yet.
        stage: how far it is.
        process: its id, None before it first answered.
        restarts: how often it has become another process.
    """

    number: int
    actor: Any = None
    stage: str = "not started"
    process: int | None = None
    restarts: int = 0


class Fleet:
    """Replicas that Ray restarts when their process ends.

    The first starts alone: it compiles what the others then load from the store.

    Args:
        start: makes an actor of `Replica`.
        count: of replicas.
        tell: called with the stage each time that another number of replicas is ready.

    Attributes:
        members: all of them.
        router: knows those that are ready.
        retried: requests that were sent to another replica, as theirs ended.
        error: why no replica can serve, None while one may.
    """

    def __init__(self, start: Callable[[], Any], count: int, tell: Callable[[str], None]) -> None:
        self.members = [Member(number) for number in range(count)]
        self.router = PrefixRouter()
        self.retried = 0
        self.error: str | None = None
        self._start, self._tell = start, tell
        self._became_ready = asyncio.Event()

    @property
    def ready(self) -> Sequence[Member]:
        """Those that answer."""
        return [each for each in self.members if each.stage == "ready"]

    @property
    def stage(self) -> str:
        """``ready`` with how many are, or what is waited for."""
        told = f"{len(self.ready)} of {len(self.members)} replicas"
        if self.ready:
            return f"ready, {told}"
        return f"warming up, {told}; the first: {self.members[0].stage}"

    async def watch(self, when_failed: Callable[[], None]) -> None:
        """Starts the replicas and looks after them, until it is cancelled or none can serve."""
        told = 0
        looks: dict[int, asyncio.Task[None]] = {}  # one that Ray has no room for answers late
        while self.error is None:
            for each in self.members:
                if each.actor is None and (each.number == 0 or self.members[0].stage == "ready"):
                    each.actor, each.stage = self._start(), "starting"
                if each.actor and (each.number not in looks or looks[each.number].done()):
                    looks[each.number] = asyncio.create_task(self._look(each))
            await asyncio.wait(looks.values(), timeout=_LOOK_EVERY)
            for look in looks.values():
                if look.done():
                    look.result()
            if told != len(self.ready):
                told = len(self.ready)
                self._tell(self.stage)
            await asyncio.sleep(_LOOK_EVERY)
        when_failed()

    async def routed(self, keys: Sequence[int]) -> tuple[Member, Route]:
        """A replica for a prompt, as soon as one is ready."""
        while (route := self.router.route(keys)) is None:
            self._became_ready.clear()
            await self._became_ready.wait()
        assert isinstance(route.replica, int)
        return self.members[route.replica], route

    def lost(self, member: Member) -> None:
        """Takes one out of the service until it is ready again."""
        self.router.remove(member.number)
        member.stage = "restarting"

    def end(self) -> None:
        """Ends all replicas."""
        for each in self.members:
            if each.actor is not None:
                with contextlib.suppress(Exception):  # one that has ended already
                    ray.kill(each.actor)

    async def _look(self, member: Member) -> None:
        try:
            state: State = await member.actor.state.remote()
        except ActorDiedError as error:  # for good: its constructor failed
            self._ended(member, str(error).strip().splitlines()[-1])
        except RayActorError:
            self.lost(member)
        else:
            self._told(member, state)

    def _told(self, member: Member, state: State) -> None:
        if member.process != state.process:
            self.router.remove(member.number)  # with what the process before had cached
            member.restarts += member.process is not None
            member.process = state.process
        if state.error is not None:
            self._ended(member, state.error)
        elif state.stage == "stopped":  # its engine failed
            self.lost(member)
            ray.kill(member.actor, no_restart=False)
        else:
            member.stage = state.stage
            if state.stage == "ready":
                self.router.add(member.number)
                self._became_ready.set()

    def _ended(self, member: Member, why: str) -> None:
        self.lost(member)
        member.stage = f"ended: {why}"
        if not self.ready:
            self.error = why
