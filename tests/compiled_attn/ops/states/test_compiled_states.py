"""The state ops in compiled graphs and in native replay."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from compiled_attn.ops import NativeOps
from tests.compiled_attn.ops.cpu.test_replayer import assert_moved
from tests.compiled_attn.ops.kernels import BEST, loaded
from tests.compiled_attn.ops.states.state_cases import (
    LAYERS,
    Draw,
    alone,
    concatenated,
    run,
    same,
    tables,
)

pytestmark = pytest.mark.usefixtures("without_gradients")
NAMES = ["conv of 4 taps", "conv of 3 taps", "delta", "delta by channel", "ssd", "scan"]


@pytest.fixture(params=["reference", BEST], scope="module")
def traced(request) -> NativeOps:
    return loaded(request.param)


@pytest.mark.parametrize("name", NAMES)
def test_the_ops_pass_torchs_own_checks(traced, name):
    layer = LAYERS[name](Draw(torch.bfloat16), 9)
    op = getattr(getattr(torch.ops, traced.namespace), layer.op).default
    step = tables([(4, 4, 3), (3, 7, 1), (0, 0, 0)])
    torch.library.opcheck(op, layer.arguments(layer.state(0.25), step))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", ["conv of 4 taps", "delta", "ssd", "scan"])
def test_one_full_graph_serves_all_sizes_of_steps_and_writes_through(traced, name, backend):
    layer = LAYERS[name](Draw(torch.float32), 40)
    inputs = [*layer.order]
    op = getattr(getattr(torch.ops, traced.namespace), layer.op)

    def step_of(given, state, *step):
        return op(*(given[name] for name in inputs), state, *step, *layer.options) * 2

    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(step_of, backend=counter, fullgraph=True, dynamic=True)
    state, at, outs = layer.state(), 0, []
    for rows in (11, 9, 2, 16, 2):  # sizes that were equal once would be taken to be always
        given = layer.tokens(at, at + rows).rows | layer.weights
        given = {name: None if each is None else each.clone() for name, each in given.items()}
        others = [(0, 0, 0)] * (rows % 4 + 1)
        outs.append(compiled(given, state, *tables([(rows, at + rows, 3), *others])))
        at += rows
    assert counter.frame_count == 1
    expected, final = alone(traced, layer.tokens(0, at))
    assert same(torch.cat(outs), expected * 2) and same(state[3], final)


def test_inductor_updates_states_in_place(traced):
    """No copy of a state, which may have a megabyte per request and layer."""
    from torch._inductor.utils import run_and_get_code

    layer = LAYERS["delta"](Draw(torch.float32), 5)
    op = getattr(getattr(torch.ops, traced.namespace), layer.op)
    torch._dynamo.reset()
    state = layer.state(0.0)
    arguments = layer.arguments(state, tables([(5, 5, 3)]))
    compiled = torch.compile(lambda *given: op(*given, True, None), fullgraph=True)
    _, (code,) = run_and_get_code(compiled, *arguments[:-2])
    assert f"{layer.op}.default" in code
    assert "copy_" not in code and "empty_strided_cpu((7," not in code
    assert state[3].any() and not state[:3].any()


def _call(name, ops, dtype):
    layers = [LAYERS[name](Draw(dtype, seed), 6) for seed in range(2)]
    layer = concatenated(layers, padding=1)
    inputs = [layer.rows.get(each, layer.weights.get(each)) for each in layer.order]
    given = [each.contiguous() if each is not None else None for each in inputs]
    state, step = layer.state(0.5), tables([(6, 8, 3), (6, 6, 1)])
    op = getattr(getattr(torch.ops, ops.namespace), layer.op)

    def call(*given):
        return [op(*given, *layer.options)]

    return [*given, state, *step], call


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", sorted({*LAYERS} - {"conv of 1 tap"}))  # it has no state
def test_a_recorded_call_does_the_same_in_other_memory(ops, replayer, name, dtype):
    assert_moved(ops, replayer, partial(_call, name, dtype=dtype))


def test_a_replayed_call_checks_the_step(ops, replayer):
    import numpy as np

    given, call = _call("delta", ops, torch.float32)
    with replayer.recording() as last_call:
        call(*given)
        words, _ = last_call()
    given[-3][0] = 99
    with pytest.raises(RuntimeError, match=r"state_delta_: expected slots\[0\] in 0..6, got 99"):
        replayer.replay(np.array([len(words) + 1, *words], np.int64))


def test_run_raises_errors_of_arguments(traced):
    """`call_op` maps errors of C++ to the class of the reference."""
    from compiled_attn.errors import KernelArgumentError

    layer = LAYERS["scan"](Draw(torch.float32), 4)
    with pytest.raises(KernelArgumentError, match="state_scan_: expected"):
        run(traced, layer, layer.state(), tables([(4, 1, 1)]))
