"""The fleet: what the front knows of the replicas that Ray Serve keeps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ray import serve
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ApplicationStatus

__all__ = ["Fleet", "Member"]

_LOOK_EVERY = 0.5  # seconds


@dataclass
class Member:
    """One replica.

    Attributes:
        number: its label in figures.
        stage: ``starting``, ``ready`` or ``restarting``.
        process: its id, None before it was first ready.
        restarts: how often it has become another process.
    """

    number: int
    stage: str = "starting"
    process: int | None = None
    restarts: int = 0


class Fleet:
    """Replicas that Ray Serve starts, looks after and starts again.

    Args:
        handle: of their deployment.
        count: of replicas.
        tell: called with the stage each time that another number of replicas is ready.

    Attributes:
        members: all of them.
        retried: requests that were sent to another replica, as theirs ended.
        error: why no replica can serve, None while one may.
    """

    def __init__(self, handle: DeploymentHandle, count: int, tell: Callable[[str], None]) -> None:
        self.members = [Member(number) for number in range(count)]
        self.retried = 0
        self.error: str | None = None
        self._handle, self._tell = handle, tell
        self._answer = handle.options(method_name="answer", stream=True)

    @property
    def ready(self) -> Sequence[Member]:
        """Those that answer."""
        return [each for each in self.members if each.stage == "ready"]

    @property
    def stage(self) -> str:
        """``ready`` or ``starting``, with how many are ready."""
        ready = len(self.ready)
        return f"{'ready' if ready else 'starting'}, {ready} of {len(self.members)} replicas"

    def answer(self, scope: dict[str, Any], body: bytes) -> Any:
        """A call of `Replica.answer`, of the replica that the router chooses."""
        return self._answer.remote(scope, body)

    async def ask(self, method: str) -> list[Any]:
        """What each replica answers that is there and able to."""
        try:
            answers = await self._handle.broadcast(method).results_async(return_exceptions=True)
        except DeploymentUnavailableError:  # there is none
            return []
        return [each for each in answers if not isinstance(each, BaseException)]

    async def watch(self, when_failed: Callable[[], None]) -> None:
        """Looks at the replicas, until it is cancelled or none can serve."""
        told = 0
        while self.error is None:
            try:
                await self._look()
            except Exception as error:  # a front that cannot see its replicas is of no use
                self.error = f"cannot ask the replicas: {error!r}"
            if told != len(self.ready):
                told = len(self.ready)
                self._tell(self.stage)
            await asyncio.sleep(_LOOK_EVERY)
        when_failed()

    async def _look(self) -> None:
        processes = {state.number: state.process for state in await self.ask("state")}
        for each in self.members:
            process = processes.get(each.number)
            if process is None:
                each.stage = "starting" if each.process is None else "restarting"
            else:
                each.restarts += each.process not in (None, process)
                each.stage, each.process = "ready", process
        if not processes:
            self.error = await asyncio.to_thread(_failure, self._handle)


def _failure(handle: DeploymentHandle) -> str | None:
    """The last line of why Serve has given up on a deployment; None: it has not."""
    application = serve.status().applications.get(handle.app_name)
    if application is None:
        return f"expected the application {handle.app_name} on the cluster, got none: start again"
    if application.status != ApplicationStatus.DEPLOY_FAILED:
        return None
    why: str = application.deployments[handle.deployment_name].message
    return why.strip().splitlines()[-1]
