"""The state of the replicas of a Ray Serve deployment, polled by the frontend."""

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

_POLL_S = 0.5


@dataclass
class Member:
    """One replica.

    Attributes:
        number: its label in metrics.
        stage: ``starting``, ``ready`` or ``restarting``.
        process: its id, None before it was first ready.
        restarts: number of new processes.
    """

    number: int
    stage: str = "starting"
    process: int | None = None
    restarts: int = 0


class Fleet:
    """Replicas that Ray Serve starts, monitors and restarts.

    Args:
        handle: of their deployment.
        count: number of replicas.
        report: called with the stage when the number of ready replicas changes.

    Attributes:
        members: all replicas.
        retried: requests that were sent to another replica because theirs exited.
        error: why no replica can serve, None while one may.
    """

    def __init__(self, handle: DeploymentHandle, count: int, report: Callable[[str], None]) -> None:
        self.members = [Member(number) for number in range(count)]
        self.retried = 0
        self.error: str | None = None
        self._handle, self._report = handle, report
        self._answer = handle.options(method_name="answer", stream=True)

    @property
    def ready(self) -> Sequence[Member]:
        """Replicas that respond."""
        return [each for each in self.members if each.stage == "ready"]

    @property
    def stage(self) -> str:
        """``ready`` or ``starting``, with the number of ready replicas."""
        ready = len(self.ready)
        return f"{'ready' if ready else 'starting'}, {ready} of {len(self.members)} replicas"

    def answer(self, scope: dict[str, Any], body: bytes) -> Any:
        """Call `Replica.answer` of the replica that the router chooses."""
        return self._answer.remote(scope, body)

    async def ask(self, method: str) -> list[Any]:
        """Return the results of a method on all replicas that respond."""
        try:
            answers = await self._handle.broadcast(method).results_async(return_exceptions=True)
        except DeploymentUnavailableError:
            return []
        return [each for each in answers if not isinstance(each, BaseException)]

    async def watch(self, on_failure: Callable[[], None]) -> None:
        """Poll the replicas until cancelled, or until none can serve."""
        ready = 0
        while self.error is None:
            try:
                await self._poll()
            except Exception as error:  # a frontend that cannot poll its replicas is of no use
                self.error = f"cannot ask the replicas: {error!r}"
            if ready != len(self.ready):
                ready = len(self.ready)
                self._report(self.stage)
            await asyncio.sleep(_POLL_S)
        on_failure()

    async def _poll(self) -> None:
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
    """The last line of Serve's reason for a failed deployment; None: it has not failed."""
    application = serve.status().applications.get(handle.app_name)
    if application is None:
        return f"expected the application {handle.app_name} on the cluster, got none: start again"
    if application.status != ApplicationStatus.DEPLOY_FAILED:
        return None
    why: str = application.deployments[handle.deployment_name].message
    return why.strip().splitlines()[-1]
