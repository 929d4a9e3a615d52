import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphs import Axis, Bucket, BucketOverflow, BucketSpace, explicit, linear
from graphs.buckets.space import _CheapestDominating

PAIRS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=20)


@settings(deadline=None)
@given(PAIRS, st.tuples(st.integers(0, 12), st.integers(0, 12)))
def test_pick_is_the_cheapest_bucket_that_holds_the_need(sizes, need):
    space = explicit(["a", "b"], sizes)
    holding = [b for b in space if b.a >= need[0] and b.b >= need[1]]
    if not holding:
        with pytest.raises(BucketOverflow):
            space.pick(a=need[0], b=need[1])
        return
    picked = space.pick(a=need[0], b=need[1])
    assert picked in holding
    assert space.cost(picked) == min(max(b.a, 1) * max(b.b, 1) for b in holding)


def test_a_tie_in_cost_goes_to_the_smaller_bucket_whatever_the_order():
    for sizes in ([(0, 4), (1, 4)], [(1, 4), (0, 4)]):
        assert explicit(["a", "b"], sizes).pick(a=0, b=3) == Bucket(a=0, b=4)


def test_a_zero_size_does_not_make_a_bucket_free():
    space = explicit(["tokens", "shared"], [(64, 0), (8, 4)])
    assert space.pick(tokens=2, shared=0) == Bucket(tokens=8, shared=4)


def test_another_cost_picks_another_bucket():
    space = explicit(["a", "b"], [(4, 100), (100, 4)])
    assert space.with_cost(lambda bucket: bucket.a).pick(a=1, b=1) == Bucket(a=4, b=100)
    assert space.with_cost(lambda bucket: bucket.b).pick(a=1, b=1) == Bucket(a=100, b=4)


def test_a_cost_that_is_not_finite_is_refused():
    with pytest.raises(ValueError, match="cost of bucket a=1 is nan"):
        explicit(["a"], [1]).with_cost(lambda bucket: float("nan"))


def test_a_need_above_the_maximum_raises_overflow():
    with pytest.raises(BucketOverflow, match="need tokens=9 fits no bucket") as caught:
        linear(tokens=(1, 4, 8)).pick(tokens=9)
    assert caught.value.largest == Bucket(tokens=8)
    assert caught.value.need == {"tokens": 9}


def test_a_need_between_free_buckets_overflows_even_below_each_maximum():
    space = explicit(["a", "b"], [(1, 8), (8, 1)])
    with pytest.raises(BucketOverflow):
        space.pick(a=2, b=2)


@pytest.mark.parametrize(
    ("need", "error", "text"),
    [
        ({"a": 1}, ValueError, "b is missing; a need gives exactly a, b"),
        ({"a": 1, "b": 1, "c": 1}, ValueError, "c is unknown"),
        ({"a": 1, "c": 1}, ValueError, "b is missing, c is unknown"),
        ({"a": -1, "b": 1}, ValueError, "a=-1 is negative"),
        ({"a": 1.0, "b": 1}, TypeError, "a=1.0 is not a whole number"),
        ({"a": float("nan"), "b": 1}, TypeError, "a=nan is not a whole number"),
    ],
)
def test_a_malformed_need_is_a_clear_error(need, error, text):
    with pytest.raises(error, match=text):
        explicit(["a", "b"], [(4, 4)]).pick(**need)


def test_numpy_integers_are_sizes_and_needs():
    space = explicit(["a"], [np.int64(4)])
    assert space.pick(a=np.int32(3)) == Bucket(a=4)


def test_buckets_keep_their_order_and_are_there_once():
    space = explicit(["a"], [4, 1, 4, 2])
    assert [bucket.a for bucket in space] == [4, 1, 2]
    assert len(space) == 3
    assert Bucket(a=2) in space and Bucket(a=3) not in space
    assert space.largest == Bucket(a=4)


def test_buckets_may_be_given_as_mappings_in_any_order_of_axes():
    space = BucketSpace(["a", "b"], [{"b": 2, "a": 1}, Bucket(b=4, a=3)])
    assert list(space) == [Bucket(a=1, b=2), Bucket(a=3, b=4)]


@pytest.mark.parametrize(
    ("axes", "buckets", "text"),
    [
        ([], [()], "at least one axis"),
        (["a", "a"], [(1, 1)], "each once"),
        (["a"], [], "at least one bucket"),
        (["a", "b"], [(1,)], "has 1 sizes"),
        (["a"], [{"b": 1}], "bucket has axes b; expected a"),
        (["a"], [(-1,)], "a=-1 is negative"),
        ([Axis("a", 0, 4)], [(5,)], "a=5 is above the axis's 4"),
    ],
)
def test_an_impossible_space_is_refused(axes, buckets, text):
    with pytest.raises(ValueError, match=text):
        BucketSpace(axes, buckets)


def test_a_product_has_every_pair_over_disjoint_axes():
    space = explicit(["a"], [1, 2]) * explicit(["b", "c"], [(0, 3), (5, 1)])
    assert space.names == ("a", "b", "c")
    assert [b.sizes for b in space] == [(1, 0, 3), (1, 5, 1), (2, 0, 3), (2, 5, 1)]
    with pytest.raises(ValueError, match="disjoint axes, both have a"):
        space * explicit(["a"], [1])


def test_spaces_with_a_cost_of_their_own_are_not_combined_in_silence():
    costly = explicit(["a"], [1]).with_cost(lambda bucket: 1.0)
    with pytest.raises(ValueError, match="with_cost"):
        costly * explicit(["b"], [1])


def legal(need):
    return need.logits <= need.tokens


def test_where_drops_exactly_the_buckets_that_no_legal_need_is_picked_for():
    space = explicit(["tokens"], [2, 4, 9]) * explicit(["logits"], [1, 3, 9])
    needs = [(t, n) for t, n in itertools.product(range(10), repeat=2) if n <= t]
    used = {space.pick(tokens=t, logits=n) for t, n in needs}
    assert set(space.where(legal)) == used
    assert set(space) - used == {Bucket(tokens=2, logits=9)}


def test_where_changes_no_pick_of_a_legal_need():
    space = linear(tokens=(1, 8, 32)) * linear(logits=(1, 8, 32)) * linear(shared=(0, 8, 16))
    kept = space.where(lambda n: legal(n) and n.shared + n.tokens <= 40)
    assert len(kept) < len(space)
    for t, n, s in itertools.product(range(1, 33, 3), range(1, 33, 3), range(17)):
        if n <= t and s + t <= 40:
            need = {"tokens": t, "logits": n, "shared": s}
            assert kept.pick(**need) == space.pick(**need)


def test_where_on_a_free_set_keeps_what_serves_from_beyond_the_next_smaller_size():
    space = explicit(["a", "b"], [(4, 4), (8, 8)])
    # (5, 2) is picked for (8, 8) although no need with b above 4 is legal.
    kept = space.where(lambda n: n.b <= 2)
    assert kept.pick(a=5, b=2) == Bucket(a=8, b=8)


def test_where_never_drops_a_legal_maximum():
    space = linear(tokens=(1, 7, 30)) * linear(logits=(1, 7, 30))
    kept = space.where(lambda n: n.tokens == n.logits == 30)
    assert list(kept) == [Bucket(tokens=30, logits=30)]


def test_where_with_nothing_legal_is_an_error():
    with pytest.raises(ValueError, match="no legal need"):
        explicit(["a"], [4]).where(lambda need: False)


def test_where_keeps_the_cost():
    space = explicit(["a", "b"], [(4, 9), (9, 4)]).with_cost(lambda bucket: bucket.a)
    assert space.where(lambda need: True).pick(a=1, b=1) == Bucket(a=4, b=9)


def points_and_queries(axes):
    point = st.tuples(*[st.integers(0, 9)] * axes)
    return st.tuples(st.lists(point, min_size=1, max_size=40), st.lists(point, max_size=20))


@given(st.integers(1, 4).flatmap(points_and_queries))
def test_the_rank_is_that_of_the_first_point_no_smaller_anywhere(case):
    points, queries = case
    lookup = _CheapestDominating(points)
    for query in queries:
        fits = [
            i for i, p in enumerate(points) if all(a >= b for a, b in zip(p, query, strict=True))
        ]
        assert lookup.rank(query) == (fits[0] if fits else -1)
