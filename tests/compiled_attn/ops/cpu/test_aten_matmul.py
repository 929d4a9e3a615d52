"""Torch matrix products as recorded calls: the same bits wherever matrices are."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import nn

from graphs import capture
from graphs.backends import onednn_linear
from graphs.torch_internals.replay.recorder import Recorder
from graphs.torch_internals.replay.replay import Replay, Replays
from tests.slow import slow_but

aten = torch.ops.aten
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
COMPLEX = torch.ones(2, 3, dtype=torch.complex64)


pytestmark = pytest.mark.usefixtures("without_gradients")


def draw(*shape, dtype):
    return torch.randn(shape).to(dtype)


def product(dtype=torch.float32, rows=5):
    return aten.mm.out, [draw(rows, 24, dtype=dtype), draw(24, 40, dtype=dtype)]


def transposed(dtype):
    return aten.mm.out, [draw(5, 24, dtype=dtype), draw(40, 24, dtype=dtype).t()]


def part_of_rows(dtype):
    return aten.mm.out, [draw(5, 60, dtype=dtype)[:, 8:32], draw(24, 40, dtype=dtype)]


def with_bias(dtype, *rows):
    return aten.addmm.out, [draw(*rows, 40, dtype=dtype), *product(dtype)[1]]


def batch_of_one(dtype, *sizes):
    rows, inner, columns = sizes or (5, 24, 40)
    left = draw(1, inner, rows, dtype=dtype).transpose(1, 2)
    return aten.bmm.out, [left, draw(inner, columns, dtype=dtype).expand(1, -1, -1)]


MAKERS = [product, transposed, part_of_rows, with_bias, lambda dtype: with_bias(dtype, 5)]
MAKERS += [batch_of_one, lambda dtype: batch_of_one(dtype, 5, 2, 40)]


def replay_at(replayer, call, moved):
    """Replays a call whose matrices are elsewhere, as `moved` says."""
    words, addresses = call
    calls = [len(words) + 1, *words]
    assert {words[at] for at in addresses} == {*moved}
    for at in addresses:
        calls[1 + at] = moved[words[at]]
    replayer.replay(np.array(calls, np.int64))


def copy_of(tensor):
    """The same in other memory, with the same strides."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_does_the_same_in_other_memory(replayer, make, dtype):
    op, args = make(dtype)
    out = op(*args, out=torch.empty(0, dtype=dtype))
    call = replayer.call_of(op, args, {"out": out}, out)
    others, again = [copy_of(each) for each in args], torch.full_like(out, 7)
    where = {
        a.data_ptr(): b.data_ptr() for a, b in zip([out, *args], [again, *others], strict=True)
    }
    replay_at(replayer, call, where)
    assert torch.equal(out, again)
    exact = torch.zeros(5, 40, dtype=torch.float64)
    bias = args[0] if len(args) == 3 else exact
    exact = bias.double() + args[-2].double() @ args[-1].double()
    torch.testing.assert_close(again.double(), exact, rtol=0.02, atol=0.1)


@pytest.mark.parametrize("rows", [1, 15, 16, 33])
@pytest.mark.parametrize("has_bias", [False, True])
def test_so_does_a_layer_of_onednn(replayer, rows, has_bias):
    bias = torch.randn(40) if has_bias else None
    args = [torch.randn(rows, 24), torch.randn(40, 24), bias]
    op = torch.ops.graphs.onednn_linear.default
    out = op(*args)
    call = replayer.call_of(op, args, {}, out)
    again = torch.full_like(out, 7)
    given = [each for each in args if each is not None]
    others = [copy_of(each) for each in given]
    where = {
        a.data_ptr(): b.data_ptr() for a, b in zip([out, *given], [again, *others], strict=True)
    }
    replay_at(replayer, call, where)
    assert torch.equal(out, again)


@pytest.mark.parametrize(
    ("op", "args", "options"),
    [
        (aten.mm.out, [torch.ones(2, 3).double(), torch.ones(3, 2).double()], {}),
        (aten.addmm.out, [torch.ones(2, 2), torch.ones(2, 3), torch.ones(3, 2)], {"beta": 2}),
        (aten.mm.out, [COMPLEX.conj(), COMPLEX.t()], {}),
        (aten.bmm.out, [torch.ones(2, 2, 3), torch.ones(2, 3, 2)], {}),
    ],
    ids=["float64", "scaled bias", "conjugate", "batch"],
)
def test_other_products_are_not_replayed(replayer, op, args, options):
    made = op(*args, **options, out=torch.empty(0, dtype=args[0].dtype))
    assert replayer.call_of(op, args, {**options, "out": made}, made) is None


def test_nor_is_what_onednn_would_put_in_another_order(replayer):
    op, args = (
        torch.ops.graphs.onednn_linear.default,
        [torch.randn(24, 20).t(), torch.randn(40, 24)],
    )
    assert replayer.call_of(op, [*args, None], {}, op(*args, None)) is None


def test_what_torch_refuses_is_an_error(replayer):
    op, args = product(torch.float32)
    out = op(*args, out=torch.empty(5, 40))
    words, _ = replayer.call_of(op, args, {"out": out}, out)
    calls = np.array([len(words) + 1, *words], np.int64)
    calls[2 + 7 + 1] += 1  # columns of the left one
    with pytest.raises(RuntimeError, match="a matrix product: expected a product of torch, got an"):
        replayer.replay(calls)


def test_what_is_put_into_an_input_is_put_there_again(replayer):
    inputs = [torch.randn(5, 24), torch.randn(24, 40), torch.zeros(5, 40)]
    recorder = Recorder(inputs, replayer)

    def run(given):
        left, right, out = given
        made = torch._C._dynamo.guards._empty_strided_cpu((5, 40), (40, 1), torch.float32)
        recorder.add_allocation(made)
        aten.mm.out(left, right, out=out)
        aten.mm.out(left, right, out=made)
        return [made]

    replays = Replays(replayer)
    replay = Replay(recorder.finish(recorder.record(run, [*inputs])), replays)
    others = [copy_of(inputs[0]) * 2, copy_of(inputs[1]), torch.zeros(5, 40)]
    (made,) = replay.run(others, replays)
    assert torch.equal(others[2], others[0] @ others[1]) and torch.equal(made, others[2])


class Layers(nn.Module):
    """Layers that inductor leaves to a library, of one bias each way, between kernels."""

    def __init__(self):
        super().__init__()
        sizes, biases = ((24, 40), (40, 24), (24, 24)), (True, False, True)
        self.layers = nn.ModuleList(
            nn.Linear(*size, bias=bias) for size, bias in zip(sizes, biases, strict=True)
        )

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


# Each compiles for two seconds, and each dtype has another function of MKL.
QUICK_OF_MKL = [(torch.float32, 1), (torch.bfloat16, 20), (torch.float16, 1)]
GRAPHS = [*itertools.product(("MKL", "oneDNN"), DTYPES, (1, 20))]


@pytest.mark.parametrize(
    ("library", "dtype", "rows"),
    slow_but([case for case in GRAPHS if case[0] == "oneDNN" or case[1:] in QUICK_OF_MKL], GRAPHS),
)
def test_a_graph_of_layers_is_replayed_with_the_same_bits(replayer, library, dtype, rows):
    torch.manual_seed(0)
    options = onednn_linear.for_cpu() if library == "oneDNN" else {}
    module, replays = Layers().to(dtype), Replays(replayer, verify=True)
    x = torch.randn(rows, 24).to(dtype)
    graph = capture(module, [x], replays=replays, options=options)
    assert (replays.recorded, replays.refused) == (1, {})
    other = torch.randn(rows, 24).to(dtype)
    made = graph.run(other)
    replays.enabled = False
    assert torch.equal(made, graph.run(other))
    torch.testing.assert_close(made, module(other), rtol=0.02, atol=0.02)
