"""Adapters' changes of linear layers against float64, and rows that depend on nothing else."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from compiled_attn.ops import NativeOps, load, lora
from tests.compiled_attn.ops.kernels import BEST, SLOW, loaded, threads

SHAPES = [(1, 32, 16, 4, 2), (7, 33, 50, 5, 4), (16, 576, 192, 16, 17), (65, 64, 96, 1, 3)]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=["reference", BEST, *SLOW], scope="module")
def ops(request) -> NativeOps:
    return load("reference") if request.param == "reference" else loaded(request.param)


def arguments(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """Arguments of the op; slot 0 has matrices of NaN."""
    rows, size_in, size_out, rank, slots = shape
    a, b = torch.randn(slots, rank, size_in), torch.randn(slots, rank, size_out)
    a[0] = b[0] = math.nan
    ranks = torch.randint(0, rank + 1, (slots,), dtype=torch.int32)
    ranks[1] = rank
    return [
        torch.randn(rows, size_out).to(dtype),
        torch.randn(rows, size_in + 8).to(dtype)[:, :size_in],
        a.to(dtype),
        b.to(dtype),
        torch.rand(slots),
        ranks,
        torch.randint(0, slots, (rows + 5,), dtype=torch.int32),
    ]


def exact(out: Tensor, x: Tensor, *others: Tensor) -> Tensor:
    """Row by row in float64."""
    a, b, scale, ranks, slots = others
    rows = []
    for row, each, slot in zip(out.double(), x.double(), slots.tolist(), strict=False):
        rank = int(ranks[slot]) if slot else 0
        change = b[slot, :rank].double().T @ (a[slot, :rank].double() @ each)
        rows.append(row + (scale[slot].double() * change if rank else 0))
    return torch.stack(rows)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_change_of_each_row_is_that_of_its_adapter(ops, shape, dtype):
    given = arguments(shape, dtype)
    got, expected = ops.add_lora(*given), exact(*given)
    bound = 1e-5 if dtype is torch.float32 else 8e-3
    torch.testing.assert_close(got.double(), expected, rtol=bound, atol=bound * shape[1] ** 0.5)
    without = given[-1][: shape[0]] == 0
    assert torch.equal(got[without], given[0][without])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_has_the_same_bits_alone_and_with_any_number_of_threads(shape, dtype):
    ops, given = loaded(BEST), arguments(shape, dtype)
    given[-1][: shape[0] // 2] = 1  # neighbours of one adapter, which are computed together
    whole = ops.add_lora(*given)
    for count in (1, 2, 7):
        with threads(count):
            assert torch.equal(ops.add_lora(*given), whole)
    for row in range(shape[0]):
        one = [part[row : row + 1] for part in given[:2]]
        assert torch.equal(ops.add_lora(*one, *given[2:-1], given[-1][row:]), whole[row : row + 1])


def test_an_adapter_of_nan_and_a_row_of_nan_change_no_other_row(ops):
    given = arguments((9, 64, 48, 4, 4), torch.float32)
    given[-1][:9] = torch.tensor([0, 1, 2, 3] * 2 + [1], dtype=torch.int32)
    given[5][:] = 4
    before = ops.add_lora(*given)
    given[2][3] = math.nan
    given[1][8] = math.nan
    after = ops.add_lora(*given)
    clean = (given[-1][:9] != 3) & (torch.arange(9) != 8)
    assert torch.equal(after[clean], before[clean]) and after[~clean].isnan().all()


def test_one_compile_serves_every_number_of_rows(fresh_compiler):
    loaded(BEST)
    frames = []

    def backend(graph, _):
        frames.append(graph)
        return graph.forward

    compiled = torch.compile(
        torch.ops.compiled_attn.add_lora, backend=backend, dynamic=True, fullgraph=True
    )
    for rows in (2, 5, 33):
        given = arguments((rows, 32, 16, 4, 3), torch.float32)
        assert torch.equal(compiled(*given), torch.ops.compiled_attn.add_lora(*given))
    assert len(frames) == 1


@pytest.mark.parametrize(
    ("at", "change", "message"),
    [
        (0, lambda t: t.half(), "out"),
        (1, lambda t: t[:, 1:], "input"),
        (1, lambda t: t[:-1], "input"),
        (2, lambda t: t.double(), "a"),
        (3, lambda t: t[:, :-1], "b"),
        (4, lambda t: t.double(), "scale"),
        (5, lambda t: t.long(), "ranks"),
        (6, lambda t: t.long(), "slots"),
        (6, lambda t: t[:3], "a slot of each"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(at, change, message):
    given = arguments((7, 32, 16, 4, 3), torch.float32)
    given[at] = change(given[at])
    with pytest.raises(RuntimeError, match=f"add_lora: expected {message}"):
        loaded(BEST).add_lora(*given)


def test_a_rank_above_the_maximum_is_refused():
    given = arguments((2, 32, 16, lora.MAX_RANK + 1, 2), torch.float32)
    with pytest.raises(RuntimeError, match="add_lora: expected a rank of at most 1024, got 1025"):
        loaded(BEST).add_lora(*given)
