"""The request router of Serve: what it counts, it forgets, however a request ends."""

from __future__ import annotations

import asyncio
import gc
from types import SimpleNamespace

import pytest

pytest.importorskip("ray.serve", reason="needs the extra 'ray'")
pytest.importorskip("openai", reason="needs the extra 'serve'")

from ray.serve._private.common import DeploymentHandleSource, DeploymentID, RequestMetadata
from ray.serve.request_router import PendingRequest, ReplicaID

from compiled_attn.contrib.replicas.by_prefix import ByPrefix

DEPLOYMENT = DeploymentID("Replica", "application")
ONE, OTHER = (ReplicaID(name, DEPLOYMENT) for name in ("one", "other"))


def replica(name: ReplicaID) -> SimpleNamespace:
    async def get_queue_len(*, deadline_s: float) -> int:
        return 0

    return SimpleNamespace(
        replica_id=name, max_ongoing_requests=9, get_queue_len=get_queue_len, node_id="here"
    )


def router_of(*names: ReplicaID) -> ByPrefix:
    router = ByPrefix(DEPLOYMENT, DeploymentHandleSource.UNKNOWN, "front")
    router.initialize_state()
    router.update_replicas([*map(replica, names)])
    return router


def request(number: int, text: str = "x" * 1000, salt: str = "") -> PendingRequest:
    scope = {"headers": [(b"x-cache-salt", salt.encode())]}
    body = f'{{"prompt": "{text}"}}'.encode()
    metadata = RequestMetadata(request_id=f"{number}", internal_request_id=f"{number}")
    return PendingRequest(args=[scope, body], kwargs={}, metadata=metadata)


async def first(router: ByPrefix, pending: PendingRequest) -> ReplicaID:
    ranked = await router.choose_replicas([*router.curr_replicas.values()], pending)
    assert {each[0].replica_id for each in ranked} == router.curr_replicas.keys()
    return ranked[0][0].replica_id


def loads(router: ByPrefix) -> dict:
    return router._policy.loads


def test_a_prefix_stays_where_it_is_and_a_salt_makes_another_one():
    async def scene() -> None:
        router = router_of(ONE, OTHER)
        chosen = await first(router, request(1))
        assert await first(router, request(2)) == chosen
        waiting = request(3, salt="tenant")
        assert await first(router, waiting) != chosen

    asyncio.run(scene())


def test_nothing_of_a_request_is_left_when_its_metadata_have_gone():
    async def scene() -> None:
        router = router_of(ONE, OTHER)
        every = [request(number, f"{number} " * 100) for number in range(100)]
        for each in every:
            await first(router, each)
        assert sum(loads(router).values()) > 100 and len(router._routes) == 100
        every.clear()
        del each
        gc.collect()
        await asyncio.sleep(0.05)
        assert [*loads(router).values()] == [0, 0] and not router._routes

    asyncio.run(scene())


def test_one_that_another_replica_took_counts_there():
    async def scene() -> None:
        router = router_of(ONE, OTHER)
        pending = request(1)
        chosen = await first(router, pending)
        other = ({ONE, OTHER} - {chosen}).pop()
        router.on_request_routed(pending, other, None)
        assert loads(router)[chosen] == 0 < loads(router)[other]
        again = await first(router, pending)  # it was not accepted there
        assert sum(loads(router).values()) == loads(router)[again] > 0
        router.on_replica_actor_died(other)
        router.on_request_routed(pending, other, None)  # a late callback
        assert [*loads(router)] == [chosen]

    asyncio.run(scene())


def test_replicas_come_and_go():
    async def scene() -> None:
        router = router_of(ONE)
        held = request(1)
        assert await first(router, held) == ONE
        router.update_replicas([replica(ONE), replica(OTHER)])
        assert loads(router)[ONE] > 0 == loads(router)[OTHER]
        router.on_replica_actor_died(ONE)
        assert await first(router, request(2)) == OTHER
        router.update_replicas([replica(ONE)])
        assert loads(router) == {ONE: 0}

    asyncio.run(scene())
