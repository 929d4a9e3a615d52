"""The simulation of the router on a small trace: prefixes are found, and replicas are balanced."""

from __future__ import annotations

from pathlib import Path

import pytest
import router

TRACE = Path(__file__).parents[3] / "shared/traces/mooncake_conversation_tiny.jsonl"


def simulated(name: str, replicas: int, requests: list[router.Request]) -> router.Outcome:
    choose = router.ROUTERS[name](replicas, 1500)
    return router.simulate(requests, choose, replicas, 1500, 0.8)


@pytest.mark.skipif(not TRACE.exists(), reason=f"there is no {TRACE}")
def test_the_router_finds_more_prefixes_and_balances_better_than_chance():
    requests = router.read(TRACE)
    ours, chance = (simulated(name, 8, requests) for name in ("prefix", "random"))
    most = router.simulate(requests, router.at_random(1, 0), 1, 10**6, 0.8).hits
    assert chance.hits < 0.8 * most < ours.hits <= most
    assert ours.balance < chance.balance
    assert ours.wait_p99 < chance.wait_p99


def test_all_routers_are_equal_with_one_replica():
    requests = [
        router.Request(0.0, 40, (1, 2)),
        router.Request(1.0, 60, (1, 2, 3)),
        router.Request(2.0, 20, (9,)),
    ]
    for name in router.ROUTERS:
        got = simulated(name, 1, requests)
        assert (got.hits, got.balance) == (2 / 6, 1.0)


def test_without_its_trace_it_is_skipped_with_a_line(capsys, tmp_path):
    router.main(["--trace", str(tmp_path / "none")])
    assert capsys.readouterr().out.startswith("skipped: ")
