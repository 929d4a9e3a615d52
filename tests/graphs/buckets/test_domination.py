from hypothesis import given, settings
from hypothesis import strategies as st

from graphs.buckets.domination import CheapestDominating


def cases(axes):
    point = st.tuples(*[st.integers(0, 9)] * axes)
    return st.tuples(st.lists(point, min_size=1, max_size=40), st.lists(point, max_size=20))


@settings(deadline=None)
@given(st.integers(1, 4).flatmap(cases))
def test_the_rank_is_that_of_the_first_point_no_smaller_anywhere(case):
    points, queries = case
    lookup = CheapestDominating(points)
    for query in queries:
        fits = [
            i for i, p in enumerate(points) if all(a >= b for a, b in zip(p, query, strict=True))
        ]
        assert lookup.rank(query) == (fits[0] if fits else -1)
