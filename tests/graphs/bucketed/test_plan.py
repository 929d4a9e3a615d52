"""Graphs of symbolic sizes run inputs as they are; only what their guards exclude is padded."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import graphs


def wrapped_of(function, example, **options) -> Any:
    options = {"backend": "aot_eager", "rows": [2, 4, 8], "check": False, **options}
    wrapped = graphs.bucketed(function, example, **options)
    wrapped.warmup()
    return wrapped


def shares(x):  # depends on padding on purpose
    return x / x.sum(0), x.mean(0)


@pytest.fixture(scope="module")
def symbolic():
    return wrapped_of(shares, (torch.randn(4, 3),))


@pytest.mark.parametrize("rows", [2, 3, 5, 7, 8])
def test_sizes_between_buckets_are_not_padded(symbolic, rows):
    x = torch.rand(rows, 3)
    before = dict(symbolic.hits)
    with graphs.no_compile():
        torch.testing.assert_close(symbolic(x), shares(x))
    bucket = graphs.Bucket(rows=2 if rows == 2 else 4 if rows < 5 else 8)
    assert symbolic.hits == before | {bucket: before[bucket] + 1}


def test_other_strides_and_inference_tensors_are_copied_without_padding(symbolic):
    across = torch.rand(3, 5).t()
    torch.testing.assert_close(symbolic(across), shares(across))
    with torch.inference_mode():
        for rows in (5, 3, 5):
            x = torch.rand(rows, 3)
            torch.testing.assert_close(symbolic(x), shares(x))


def test_the_compiled_graph_is_shared(symbolic):
    assert symbolic.report.compiles == 1
    assert symbolic.report.graphs == 1


def test_what_a_guard_excludes_is_padded():
    def by_fours(x):
        return (x * 2 if len(x) % 4 == 0 else x + x), x.sum(0)

    wrapped = wrapped_of(by_fours, (torch.randn(4, 3),), rows=[4, 8, 16])
    for rows in (4, 7, 12, 16, 3):
        x = torch.rand(rows, 3)
        with graphs.no_compile():
            torch.testing.assert_close(wrapped(x), by_fours(x))
    assert len(wrapped.report.captured) == 3


def test_one_row_is_padded_where_no_graph_was_compiled_for_it(symbolic):
    x = torch.rand(1, 3)
    assert symbolic(x)[1].tolist() != shares(x)[1].tolist()  # the mean of two rows


def test_fixed_sizes_are_padded():
    wrapped = wrapped_of(shares, (torch.randn(4, 3),), symbolic=False)
    x = torch.rand(3, 3)
    assert torch.allclose(wrapped(x)[1] * 4, shares(x)[1] * 3)


def test_state_that_a_graph_writes_is_written_once():
    class Counter(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(3))

        def forward(self, x):
            self.total.add_(x.sum(0))
            return x * 1

    counter = Counter()
    wrapped = wrapped_of(counter, (torch.zeros(4, 3),))
    before, x = counter.total.clone(), torch.rand(3, 3)
    wrapped(x)
    torch.testing.assert_close(counter.total, before + x.sum(0))
