"""The simulation of the router, on a small trace: prefixes are found, and nobody is left idle."""

from __future__ import annotations

from pathlib import Path

import pytest
import router

TRACE = Path(__file__).parents[3] / "shared/traces/mooncake_conversation_tiny.jsonl"


def outcome(name: str, replicas: int, requests: list[router.Request]) -> router.Outcome:
    choose = router.ROUTERS[name](replicas, 1500)
    return router.simulate(requests, choose, replicas, 1500, 0.8)


@pytest.mark.skipif(not TRACE.exists(), reason=f"there is no {TRACE}")
def test_the_router_finds_more_than_chance_and_balances_as_well():
    requests = router.read(TRACE)
    ours, drawn = (outcome(name, 8, requests) for name in ("prefix", "random"))
    most = router.simulate(requests, router.at_random(1, 0), 1, 10**6, 0.8).hits
    assert drawn.hits < 0.8 * most < ours.hits <= most
    assert ours.balance < drawn.balance
    assert ours.wait_p99 < drawn.wait_p99


def test_one_replica_finds_what_was_computed_before_and_all_routers_are_alike():
    requests = [
        router.Request(0.0, 40, (1, 2)),
        router.Request(1.0, 60, (1, 2, 3)),
        router.Request(2.0, 20, (9,)),
    ]
    for name in router.ROUTERS:
        got = outcome(name, 1, requests)
        assert (got.hits, got.balance) == (2 / 6, 1.0)


def test_without_its_trace_it_is_skipped_with_a_line(capsys, tmp_path):
    router.main(["--trace", str(tmp_path / "none")])
    assert capsys.readouterr().out.startswith("skipped: ")
