"""``torch.compile(backend="bucketed")`` against the module it compiles."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import graphs
from graphs.bucketed.dynamo import bucketed_backend as bucketed
from graphs.errors import BucketedError, BucketOverflow


@pytest.fixture
def module():
    torch._dynamo.reset()
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 8), nn.GELU()).eval()


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_sizes_within_the_ranges_compile_nothing(module, inner):
    options = {"batch": (2, 8), "length": (4, 16), "inner": inner}
    compiled = torch.compile(module, backend=bucketed, dynamic=True, options=options)
    with torch.no_grad():
        compiled(torch.randint(0, 50, (3, 5)))
        with graphs.no_compile():
            for sizes in ((2, 7), (8, 16), (5, 3)):
                ids = torch.randint(0, 50, sizes)
                torch.testing.assert_close(compiled(ids), module(ids))
            with pytest.raises(BucketOverflow, match="batch=9 length=9"):
                compiled(torch.randint(0, 50, (9, 9)))


def test_a_batch_of_one_is_traced_apart_and_served(module):
    options = {"batch": (1, 8), "length": (4, 16), "inner": "eager"}
    compiled = torch.compile(module, backend=bucketed, dynamic=True, options=options)
    with torch.no_grad():
        for sizes in ((3, 5), (1, 9), (1, 3), (4, 4)):
            ids = torch.randint(0, 50, sizes)
            torch.testing.assert_close(compiled(ids), module(ids))


def test_marked_dimensions_are_axes_too(module):
    compiled = torch.compile(module, backend=bucketed, options={"batch": (2, 8), "inner": "eager"})
    with torch.no_grad():
        ids = torch.randint(0, 50, (3, 5))
        torch._dynamo.mark_dynamic(ids, 0)
        torch.testing.assert_close(compiled(ids), module(ids))
        with graphs.no_compile():
            ids = torch.randint(0, 50, (7, 5))
            torch.testing.assert_close(compiled(ids), module(ids))


def test_a_graph_of_fixed_sizes_is_compiled_as_it_is(module, caplog):
    compiled = torch.compile(module, backend=bucketed, dynamic=False, options={"batch": (2, 8)})
    ids = torch.randint(0, 50, (3, 5))
    with torch.no_grad():
        torch.testing.assert_close(compiled(ids), module(ids))
    assert "no symbolic size" in caplog.text


def test_a_missing_range_is_one_line(module):
    compiled = torch.compile(module, backend=bucketed, dynamic=True)
    with pytest.raises(Exception, match="expected a range for each axis, got none"):
        compiled(torch.randint(0, 50, (3, 5)))


def test_sizes_that_are_equal_at_the_trace_are_one_axis_of_that_graph(module):
    options = {"batch": (2, 8), "length": (4, 16), "inner": "eager"}
    compiled = torch.compile(module, backend=bucketed, dynamic=True, options=options)
    with torch.no_grad():
        for sizes in ((5, 5), (3, 7), (7, 7)):
            ids = torch.randint(0, 50, sizes)
            torch.testing.assert_close(compiled(ids), module(ids))
        with pytest.raises(BucketOverflow, match="batch=9"):
            compiled(torch.randint(0, 50, (9, 9)))


def test_gradients_are_refused_by_name(module):
    options = {"batch": (2, 8), "length": (4, 16), "inner": "eager"}
    compiled = torch.compile(module, backend=bucketed, dynamic=True, options=options)
    with pytest.raises(BucketedError, match="no gradients"):
        compiled(torch.randint(0, 50, (3, 5)))
