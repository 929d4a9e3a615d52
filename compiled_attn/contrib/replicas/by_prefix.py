"""Adapts `PrefixRouter` to the request router interface of Ray Serve."""

from __future__ import annotations

import asyncio
import weakref
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from compiled_attn.contrib.replicas.router import PrefixRouter, Route, prompt_keys
from compiled_attn.serve.context import SALT_HEADER

__all__ = ["ByPrefix"]

_SALT = SALT_HEADER.lower().encode()


class ByPrefix(RequestRouter):  # type: ignore[misc]
    """Sends a request to the replica that has its prefix cached.

    It runs in the frontend's process, in Serve's own loop and thread. A request counts at its
    replica until its metadata are garbage collected, which covers every way that it can finish:
    Serve's own callbacks miss a client that disconnects during assignment.
    """

    queue_len_response_deadline_s = 1.0  # Serve's default of 0.1 is too short for a busy replica

    def initialize_state(self, **_: Any) -> None:
        """Start without replicas."""
        self._policy = PrefixRouter()
        self._routes: dict[str, Route] = {}

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Set the running replicas."""
        super().update_replicas(replicas)
        running = {each.replica_id for each in replicas}
        for name in self._policy.loads.keys() - running:
            self._policy.remove(name)
        for name in running:
            self._policy.add(name)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Remove a replica before Serve does."""
        super().on_replica_actor_died(replica_id)
        self._policy.remove(replica_id)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return all running replicas, best first.

        The request counts at once, since others are routed before the replica accepts it.
        """
        assert pending_request is not None
        keys = _keys(pending_request)
        ranked = self._policy.ranked(keys)
        self._take(pending_request, ranked[0], keys)
        return [[self.curr_replicas[name]] for name in ranked]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Record which replica accepted the request."""
        taken = self._routes[pending_request.metadata.internal_request_id].replica
        if taken != replica_id and replica_id in self._policy.loads:
            self._take(pending_request, replica_id, _keys(pending_request))

    def _take(self, request: PendingRequest, name: ReplicaID, keys: list[int]) -> None:
        number = request.metadata.internal_request_id
        if not self._finish(number):
            loop = asyncio.get_running_loop()  # the finalizer may run in another thread
            finalizer = weakref.finalize(
                request.metadata, loop.call_soon_threadsafe, self._finish, number
            )
            finalizer.atexit = False
        self._routes[number] = self._policy.take(name, keys)

    def _finish(self, number: str) -> bool:
        """Whether the request was counted."""
        if (route := self._routes.pop(number, None)) is not None:
            self._policy.done(route)
        return route is not None


def _keys(request: PendingRequest) -> list[int]:
    scope, body = request.args
    return prompt_keys(body, dict(scope["headers"]).get(_SALT, b""))
