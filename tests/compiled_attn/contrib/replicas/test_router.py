"""The router: longest prefix below the limit, else the least loaded; no load is ever lost."""

from __future__ import annotations

import json
from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled_attn.contrib.replicas.router import PrefixRouter, RecentBlocks, Route, prompt_keys
from compiled_attn.errors import ConfigError


def router_of(count: int, **settings: float) -> PrefixRouter:
    made = PrefixRouter(**settings)
    for name in range(count):
        made.add(name)
    return made


def route(router: PrefixRouter, keys: list[int]) -> Route:
    return router.take(router.ranked(keys)[0], keys)


def test_a_prompt_goes_where_its_prefix_went():
    router = router_of(4)
    first = route(router, [1, 2, 3])
    router.done(first)
    for other in ([7, 8], [9, 10], [11, 12]):
        router.done(route(router, other))
    again = route(router, [1, 2, 3, 4])
    assert (again.replica, again.shared, again.work) == (first.replica, 3, 2)


def test_the_longest_of_two_prefixes_wins():
    router = router_of(2, max_load=100)
    short, long = route(router, [1, 2, 8, 9]), route(router, [5, 6])
    assert short.replica != long.replica
    router.remove(short.replica)
    route(router, [1, 2, 3, 4])
    router.add(short.replica)
    assert route(router, [1, 2, 3, 4, 5]).replica == long.replica


def test_unknown_prompts_go_to_the_least_loaded_in_turns():
    router = router_of(3)
    routes = [route(router, [10 * at, 10 * at + 1]) for at in range(1, 4)]
    assert [each.replica for each in routes] == [0, 1, 2]
    router.done(routes[2])
    assert route(router, [88]).replica == 2


def test_a_beginning_that_all_share_decides_nothing():
    router = router_of(2)
    every = [[0, *range(100 * at, 100 * at + 20)] for at in range(1, 9)]
    for prompt in every:
        router.done(route(router, prompt))
    used = [route(router, prompt).replica for prompt in every]
    assert used.count(0) == used.count(1) == 4


def test_a_hot_prefix_is_spread_when_its_replica_has_too_much_to_do():
    router = router_of(4, max_load=1.5)
    used = [route(router, [1, 2, 3]).replica for _ in range(400)]
    assert max(map(used.count, range(4))) <= 1.5 * 100 + 4


def test_one_that_has_too_much_to_do_is_ranked_last_whatever_it_shares():
    router = router_of(3, max_load=1)
    first = route(router, [1, 2, 3])
    assert router.ranked([1, 2, 3]) == [1, 2, first.replica]
    router.done(first)
    assert router.ranked([1, 2, 3]) == [first.replica, 1, 2]


def test_a_replica_that_comes_back_has_nothing_cached_and_nothing_to_do():
    router = router_of(1)
    before = route(router, [1, 2, 3])
    router.remove(0)
    assert router.ranked([1]) == []
    router.add(0)
    router.done(before)
    assert router.loads == {0: 0}
    assert route(router, [1, 2, 3]).shared == 0


def test_numbers_out_of_bounds_are_refused():
    for wrong in ({"max_blocks": 0}, {"max_load": 0.5}, {"min_share": 2}):
        with pytest.raises(ConfigError, match="expected max_blocks >= 1"):
            PrefixRouter(**wrong)


prompts = st.lists(st.integers(0, 6), max_size=6).map(
    lambda blocks: [hash((*blocks[: at + 1],)) for at in range(len(blocks))]
)
events = st.one_of(
    st.tuples(st.just("route"), prompts),
    st.tuples(st.just("done"), st.integers(0, 99)),
    st.tuples(st.just("remove"), st.integers(0, 3)),
    st.tuples(st.just("add"), st.integers(0, 3)),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(events, max_size=60), st.sampled_from([1.0, 1.5, 4.0]))
def test_loads_are_those_of_open_routes_and_none_is_above_the_limit(happened, max_load):
    router, names = router_of(2, max_load=max_load), {0, 1}
    opened: list = []
    for kind, value in happened:
        if kind == "route" and names:
            loads = router.loads
            mean = (sum(loads.values()) + 1 + len(value)) / len(loads)
            taken = route(router, value)
            assert loads[taken.replica] < max_load * mean
            opened.append(taken)
        elif kind == "done" and opened:
            router.done(opened.pop(value % len(opened)))
        elif kind == "remove":
            router.remove(value)
            names.discard(value)
            opened = [each for each in opened if each.replica != value]
        elif kind == "add":
            router.add(value)
            names.add(value)
        assert router.loads == {
            name: sum(each.work for each in opened if each.replica == name) for name in names
        }


@settings(max_examples=150, deadline=None)
@given(st.lists(prompts, max_size=30), st.integers(1, 8))
def test_recent_blocks_are_bounded_and_evict_ends_before_beginnings(used, most):
    recent, oracle = RecentBlocks(most), OrderedDict()
    for keys in used:
        recent.use(keys)
        for key in reversed(keys):
            oracle.pop(key, None)
            oracle[key] = True
        oracle = OrderedDict([*oracle.items()][-most:])
        assert len(recent) == len(oracle) <= most
        held = [key in oracle for key in keys]
        assert held == sorted(held, reverse=True)
        assert recent.shared(keys) == sum(held)


def shared(one: list[int], other: list[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
                min(len(one), len(other)))  # fmt: skip


@given(st.text("ab", max_size=400), st.text("ab", max_size=400))
def test_as_many_keys_are_shared_as_blocks_of_64_characters(one, other):
    texts = [json.dumps(each) for each in (one, other)]
    alike = next((at for at in range(min(map(len, texts))) if texts[0][at] != texts[1][at]),
                 min(map(len, texts)))  # fmt: skip
    keys = [prompt_keys(json.dumps({"prompt": each}).encode()) for each in (one, other)]
    assert [*map(len, keys)] == [len(text) // 64 for text in texts]
    assert shared(*keys) == alike // 64


def test_the_next_turn_of_a_chat_has_the_keys_of_the_turns_before():
    turns = [{"role": "user", "content": "x" * 300}]
    first = prompt_keys(json.dumps({"messages": turns, "seed": 1}).encode())
    turns += [{"role": "assistant", "content": "y" * 90}, {"role": "user", "content": "z"}]
    second = prompt_keys(json.dumps({"seed": 2, "messages": turns}).encode())
    assert shared(first, second) >= len(first) - 1 >= 3
    assert len(second) > len(first)


def test_tenants_share_no_keys():
    body = json.dumps({"prompt": "x" * 1000}).encode()
    assert not {*prompt_keys(body, b"one")} & {*prompt_keys(body, b"two")}


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"\xff", b"[" * 100_000, b'{"n": 1}'])
def test_what_has_no_prompt_has_no_keys(body):
    assert prompt_keys(body) == []
