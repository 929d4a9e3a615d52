"""The numbers of many requests at once are those of numpy's generator, one by one."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from compiled_attn.engine.uniform import uniforms

NUMBERS = st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**40))


@given(numbers=st.lists(NUMBERS, min_size=1, max_size=8))
def test_each_number_is_that_of_numpys_philox(numbers):
    expected = [
        np.random.Generator(np.random.Philox(key=seed, counter=step)).random()
        for seed, step in numbers
    ]
    assert uniforms(*zip(*numbers, strict=True)).tolist() == expected
