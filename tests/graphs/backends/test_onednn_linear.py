"""The oneDNN pass: takes linear layers of parameters, leaves the rest, changes rounding only."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._inductor.utils import run_and_get_code

from graphs import WarmupManager, capture, explicit
from graphs.backends.onednn_linear import for_cpu


class Layers(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Linear(24, 40, dtype=dtype)
        self.second = nn.Linear(40, 8, bias=False, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x))) @ torch.ones(8, 3, dtype=x.dtype)


@pytest.fixture(autouse=True)
def needs_onednn():
    if not for_cpu():
        pytest.skip("this torch has no MKL to replace, or no oneDNN to replace it with")


def _calls(
    rows: int, dtype: torch.dtype = torch.float32, sizes: set[tuple[int, int]] | None = None
) -> int:
    module, x = Layers(dtype), torch.randn(rows, 24, dtype=dtype)
    compiled = torch.compile(module, fullgraph=True, dynamic=False, options=for_cpu(sizes))
    with torch.no_grad():
        out, (code,) = run_and_get_code(compiled, x)
    torch.testing.assert_close(
        out, module(x), atol=1e-2 if dtype.itemsize == 2 else 1e-5, rtol=1e-2
    )
    return code.count("torch.ops.graphs.onednn_linear.default(")


def test_linear_layers_with_and_without_bias_are_taken_and_other_matmuls_left():
    assert _calls(rows=32) == 2


def test_only_layers_of_the_sizes_that_are_given_are_taken():
    assert _calls(rows=32, sizes={(40, 24)}) == 1
    assert for_cpu(set()) == {}


def test_the_sizes_are_part_of_the_identity_of_the_pass():
    passes = [for_cpu(sizes) for sizes in (None, {(40, 24)}, {(8, 40)})]
    assert len({each["post_grad_custom_post_pass"].uuid() for each in passes}) == 3


@pytest.mark.parametrize(("rows", "dtype"), [(4, torch.float32), (32, torch.bfloat16)])
def test_few_rows_and_other_dtypes_stay_with_torch(rows, dtype):
    assert _calls(rows, dtype) == 0


def test_symbolic_rows_are_taken_and_few_of_them_computed_as_torch_does():
    module = Layers()

    def inputs_of(bucket):
        return [torch.randn(bucket.rows, 24)]

    space = explicit(["rows"], [4, 16, 64])
    options = {"symbolic": ("rows",), "options": for_cpu(), "timed_runs": 0}
    manager = WarmupManager(module, space, inputs_of, **options)
    with torch.no_grad():
        report, (code,) = run_and_get_code(manager.warmup)
    assert report.graphs == 1 and code.count("torch.ops.graphs.onednn_linear.default(") == 2
    for bucket in space:
        (x,) = inputs_of(bucket)
        torch.testing.assert_close(manager.run(bucket, x), module(x), atol=1e-5, rtol=1e-5)


def test_a_captured_graph_follows_a_parameter_that_changes():
    module, x = Layers(), torch.randn(16, 24)
    with torch.no_grad():
        graph = capture(module, (x,), options=for_cpu())
        module.first.weight.mul_(0.5)
        torch.testing.assert_close(graph.run(x), module(x), atol=1e-5, rtol=1e-5)


def test_the_op_and_its_shape_function_agree():
    inputs = (torch.randn(5, 6), torch.randn(7, 6), torch.randn(7))
    torch.library.opcheck(torch.ops.graphs.onednn_linear.default, inputs)
    torch.library.opcheck(torch.ops.graphs.onednn_linear.default, (*inputs[:2], None))
