"""The request router of Ray Serve that asks the policy: the bridge between the two."""

from __future__ import annotations

import asyncio
import weakref
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from compiled_attn.replicas.prompt_keys import prompt_keys
from compiled_attn.replicas.router import PrefixRouter, Route
from compiled_attn.serve.context import SALT_HEADER

__all__ = ["ByPrefix"]

_SALT = SALT_HEADER.lower().encode()


class ByPrefix(RequestRouter):  # type: ignore[misc]
    """Sends a request where its prefix is cached.

    It lives in the process of the front, in Serve's own loop and thread. A request counts at its
    replica for as long as its metadata exist, which the front drops when it has ended, however that
    was. Serve tells of ends too, but not of a request whose client leaves at the moment that it is
    assigned, and of a short one perhaps before its beginning.
    """

    queue_len_response_deadline_s = 1.0  # Serve's tenth is too short for one that computes

    def initialize_state(self, **_: Any) -> None:
        """Begins without replicas."""
        self._policy = PrefixRouter()
        self._routes: dict[str, Route] = {}

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Those that run now."""
        super().update_replicas(replicas)
        running = {each.replica_id for each in replicas}
        for name in self._policy.loads.keys() - running:
            self._policy.remove(name)
        for name in running:
            self._policy.add(name)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """One has died that Serve still counts."""
        super().on_replica_actor_died(replica_id)
        self._policy.remove(replica_id)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """All that run, the one to take first.

        It counts as taken at once, as others are chosen before it answers.
        """
        assert pending_request is not None
        keys = _keys(pending_request)
        ranked = self._policy.ranked(keys)
        self._take(pending_request, ranked[0], keys)
        return [[self.curr_replicas[name]] for name in ranked]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """It was accepted, maybe not by the one to take first."""
        taken = self._routes[pending_request.metadata.internal_request_id].replica
        if taken != replica_id and replica_id in self._policy.loads:
            self._take(pending_request, replica_id, _keys(pending_request))

    def _take(self, request: PendingRequest, name: ReplicaID, keys: list[int]) -> None:
        number = request.metadata.internal_request_id
        if not self._end(number):
            loop = asyncio.get_running_loop()  # whoever drops it may be another thread
            ended = weakref.finalize(request.metadata, loop.call_soon_threadsafe, self._end, number)
            ended.atexit = False
        self._routes[number] = self._policy.take(name, keys)

    def _end(self, number: str) -> bool:
        """Whether it was counted."""
        if (route := self._routes.pop(number, None)) is not None:
            self._policy.done(route)
        return route is not None


def _keys(request: PendingRequest) -> list[int]:
    scope, body = request.args
    return prompt_keys(body, dict(scope["headers"]).get(_SALT, b""))
