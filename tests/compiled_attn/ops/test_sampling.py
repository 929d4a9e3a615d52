"""The op ``sample_tokens`` against sorted rows, with every kernel of this machine."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled_attn.ops import NativeOps, load
from compiled_attn.ops.sampling import NO_TOKEN, UNDECIDED, greedy, reference, sample
from tests.compiled_attn.ops.kernels import BEST, SLOW, loaded, threads
from tests.slow import slow_but

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=["reference", BEST, *SLOW], scope="module")
def ops(request) -> NativeOps:
    return loaded(request.param)


def rows_of(kind: str, rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    chance = torch.Generator().manual_seed(seed)
    normal = torch.randn(rows, vocab, generator=chance)
    return {
        "spread": lambda: 3 * normal,
        "peaked": lambda: normal.exp() ** 2,
        "flat": lambda: normal / 100,
        "equal": lambda: torch.full((rows, vocab), -7.0),
        "ties": lambda: (2 * normal).round(),
        "zeros": lambda: torch.where(normal > 0, 0.0, -0.0),
        "banned": lambda: normal.masked_fill(normal < 1, -torch.inf).index_fill_(
            1, torch.tensor([vocab // 2]), 0.5
        ),
        "one": lambda: torch.full((rows, vocab), -torch.inf).index_fill_(
            1, torch.tensor([vocab - 1]), 3.0
        ),
        "wide": lambda: 1e4 * normal,
        "near": lambda: (normal - 30).index_fill_(1, torch.tensor([vocab // 3]), 0.0),
    }[kind]()


KINDS = ["spread", "peaked", "flat", "equal", "ties", "zeros", "banned", "one", "wide", "near"]
# Around a vector of each kind of registers, the vectors of a group, and the fewest groups.
SIZES = [1, 2, 3, 5, 8, 16, 17, 100, 511, 512, 2047, 2080, 4101, 8192, 8195, 9001]
UNIFORM = [0.0, 1e-300, 1e-9, 0.3, 0.5, 0.9, 0.97, 0.999999, 1 - 2**-53]


def draws_of(*rows: tuple[float, int, float, float, float]) -> tuple[torch.Tensor, ...]:
    """The op's settings, of rows of temperature, top-k, top-p, min-p and uniform."""
    kinds = (torch.float64, torch.int64, torch.float64, torch.float64, torch.float64)
    columns = zip(*rows, strict=True)
    return tuple(torch.tensor(c, dtype=d) for c, d in zip(columns, kinds, strict=True))


def of_sorted(logits, temperature, top_k, top_p, min_p, uniform) -> int:
    """The definition, in numpy: a row sorted, cut, and walked along."""
    row = logits.double().numpy()
    if not np.isfinite(row.max()):
        return NO_TOKEN
    order = np.argsort(-row, kind="stable")
    if temperature == 0:
        return int(order[0])
    with np.errstate(over="ignore"):
        weights = np.exp((row[order] - row.max()) / temperature)[:top_k]
    sums = weights.cumsum()
    weights = weights[sums - weights < top_p * sums[-1]]
    weights = weights[weights >= min_p]
    sums = weights.cumsum()
    index = np.searchsorted(sums, uniform * sums[-1], side="right")
    return int(order[min(index, np.count_nonzero(weights) - 1)])


def settle(ops: NativeOps, logits: torch.Tensor, settings) -> torch.Tensor:
    """The tokens of the op; those that it leaves undecided by the definition."""
    tokens = ops.sample_tokens(logits, *settings)
    rows = (tokens == UNDECIDED).nonzero().squeeze(1)
    tokens[rows] = reference(logits[rows], *(each[rows] for each in settings))
    return tokens


DRAWS = st.tuples(
    st.sampled_from([0.0, 0.01, 0.02, 0.8, 1.0, 1.5, 30.0, 1e-200, 1e-30, 1e30, 1e300, 5e-324]),
    st.sampled_from([10**9, 10**9, 1, 2, 40, 500, 1025, 4000]),
    st.sampled_from([1.0, 1.0, 0.1, 0.8973, 0.9999, 1e-9]),
    st.sampled_from([0.0, 0.0, 1e-30, 1e-7, 0.1, 1.0]),
    st.sampled_from(UNIFORM) | st.floats(0, 1, exclude_max=True),
)


@given(
    kind=st.sampled_from(KINDS),
    size=st.sampled_from(SIZES),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
    draws=st.lists(DRAWS, min_size=1, max_size=8),
)
@settings(deadline=None)
def test_each_token_is_that_of_its_sorted_row(ops, kind, size, dtype, seed, draws):
    logits = rows_of(kind, len(draws), size, seed).to(dtype)
    expected = [of_sorted(row, *draw) for row, draw in zip(logits, draws, strict=True)]
    assert settle(ops, logits, draws_of(*draws)).tolist() == expected


@pytest.mark.parametrize(
    ("dtype", "temperature"),
    slow_but(zip(DTYPES, (0.8, 3.0, 0.8), strict=True), product(DTYPES, (0.8, 3.0))),
)
def test_draws_of_a_large_vocabulary_are_those_of_sorted_rows(ops, dtype, temperature):
    logits = rows_of("spread", 5, 32003).to(dtype)
    filters = [
        (10**9, 1.0, 0.0),
        (10**9, 0.9, 0.0),
        (50, 0.9, 0.0),
        (10**9, 1.0, 0.02),
        (2000, 1, 0),
    ]
    for uniform in np.linspace(0, 1, 20, endpoint=False):
        draws = [(temperature, *each, float(uniform)) for each in filters]
        expected = [of_sorted(row, *draw) for row, draw in zip(logits, draws, strict=True)]
        assert settle(ops, logits, draws_of(*draws)).tolist() == expected


@pytest.mark.parametrize("kind", ["spread", "flat", "peaked", "banned", "near"])
def test_the_native_op_decides_nearly_all_by_itself(kind):
    ops = loaded(BEST)
    draws = [(0.8, 10**9, p, 0.0, u) for u in np.linspace(0.001, 0.999, 100) for p in (1.0, 0.9)]
    tokens = ops.sample_tokens(rows_of(kind, len(draws), 9001), *draws_of(*draws))
    assert (tokens == UNDECIDED).sum() <= 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 33, 9001])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_has_no_token_and_harms_no_other(ops, bad, size, dtype):
    logits = rows_of("spread", 6, size).to(dtype)
    settings = draws_of(*[(temperature, 9, 0.9, 0.0, 0.5) for temperature in (0.0, 1.0) * 3])
    expected = settle(ops, logits, settings).tolist()
    for row, token in enumerate((0, size // 2, size - 1)):
        logits[2 * row, token] = logits[2 * row + 1, token] = bad
    assert settle(ops, logits, settings).tolist() == [NO_TOKEN] * 6
    logits[1:] = rows_of("spread", 6, size).to(dtype)[1:]
    assert settle(ops, logits, settings).tolist() == [NO_TOKEN, *expected[1:]]
    logits[0] = -torch.inf
    assert settle(ops, logits, settings).tolist() == [NO_TOKEN, *expected[1:]]


@pytest.mark.parametrize("size", [7, 4096, 9001])
def test_the_most_likely_token_is_the_first_of_equals(ops, size):
    logits = torch.zeros(size, size)[: min(size, 50)]
    at = torch.randint(size, (len(logits), 2), generator=torch.Generator().manual_seed(1))
    logits.scatter_(1, at, 1.0)
    settings = draws_of(*[(0.0, 1, 1.0, 0.0, 0.0)] * len(logits))
    assert torch.equal(ops.sample_tokens(logits, *settings), at.amin(1))


def test_rows_of_logits_may_lie_apart_or_be_one(ops):
    logits = rows_of("spread", 8, 3000)
    settings = draws_of(*[(1.0, 10**9, 0.95, 0.0, n / 8) for n in range(8)])
    part = logits[:, 500:2600]
    assert torch.equal(settle(ops, part, settings), settle(ops, part.contiguous(), settings))
    same = logits[:1].expand(8, -1)
    assert torch.equal(settle(ops, same, settings), settle(ops, same.contiguous(), settings))


def test_no_rows_have_no_tokens(ops):
    settings = [each[:0] for each in draws_of((1.0, 5, 0.9, 0.0, 0.5))]
    assert ops.sample_tokens(torch.zeros(0, 50), *settings).tolist() == []


def test_neither_threads_nor_neighbours_change_a_token():
    ops = loaded(BEST)
    logits = rows_of("spread", 40, 9001)
    settings = draws_of(*[(1.5, 10**9, 0.99, 0.0, n / 40) for n in range(40)])
    with threads(1):
        alone = ops.sample_tokens(logits, *settings)
        each = [
            ops.sample_tokens(logits[n, None], *(s[n, None] for s in settings)) for n in range(40)
        ]
    with threads(3):
        assert torch.equal(ops.sample_tokens(logits, *settings), alone)
    assert torch.equal(torch.cat(each), alone)


@pytest.mark.parametrize("bad", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("number", [float("nan"), float("inf"), -1.0, 1e300])
def test_settings_out_of_range_give_some_token(bad, number):
    settings = draws_of(*[(0.8, 40, 0.9, 0.01, 0.5)] * 3)
    if bad != 1:
        settings[bad][1] = number
    else:
        settings[1][1] = -1
    logits = rows_of("spread", 3, 9001)
    tokens = loaded(BEST).sample_tokens(logits, *settings)
    assert tokens[0] == of_sorted(logits[0], 0.8, 40, 0.9, 0.01, 0.5)
    assert UNDECIDED <= tokens[1] < 9001


GOOD = {
    "logits": torch.zeros(3, 20),
    "temperature": torch.ones(3).double(),
    "top_k": torch.full((3,), 5),
    "top_p": torch.ones(3).double(),
    "min_p": torch.zeros(3).double(),
    "uniform": torch.zeros(3).double(),
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(20)}, r"logits: \[any, any\], got \[20\]"),
        ({"logits": torch.zeros(3, 0)}, "a vocabulary of 1..2147483647, got 0"),
        ({"logits": torch.zeros(3, 20).double()}, "Float, BFloat16 or Half, got Double"),
        ({"logits": torch.zeros(3, 20).char()}, "Float, BFloat16 or Half, got Char"),
        ({"logits": torch.zeros(20, 3).T}, "last stride 1"),
        ({"top_k": torch.ones(3).int()}, "top_k: Long, got Int"),
        ({"top_p": torch.ones(3)}, "top_p: Double, got Float"),
        ({"uniform": torch.zeros(2).double()}, r"uniform: \[3\], got \[2\]"),
        ({"min_p": torch.zeros(6).double()[::2]}, "min_p: dense"),
    ],
)
def test_wrong_tensors_are_refused(change, message):
    with pytest.raises(RuntimeError, match=f"sample_tokens: expected .*{message}"):
        loaded(BEST).sample_tokens(*{**GOOD, **change}.values())


def test_torch_finds_nothing_wrong_with_the_op():
    load()
    torch.library.opcheck(
        torch.ops.compiled_attn.sample_tokens.default,
        tuple(GOOD.values()),
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
    )


def test_float64_rows_are_drawn_from_by_the_definition():
    logits = rows_of("spread", 3, 700).double()
    draws = [(0.8, 10**9, 0.9, 0.0, u) for u in (0.1, 0.5, 0.99)]
    expected = [of_sorted(row, *draw) for row, draw in zip(logits, draws, strict=True)]
    assert sample(logits, greedy(logits), *draws_of(*draws)).tolist() == expected
