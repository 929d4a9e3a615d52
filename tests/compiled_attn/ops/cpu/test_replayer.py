"""Calls that the ops record, and their native replay."""

from __future__ import annotations

import ctypes
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from compiled_attn.ops import load, packed_linear
from compiled_attn.ops.cpu.replayer import NativeReplayer
from compiled_attn.ops.schema import schemas
from graphs import capture
from graphs.torch_internals.replay.replay import Replays
from tests.compiled_attn.ops.native_scene import new_tokens, scene
from tests.compiled_attn.ops.quantised_layers import arguments, quantised_layer
from tests.graphs.torch_internals.replay.replayer_double import ReplayerDouble

pytestmark = pytest.mark.usefixtures("without_gradients")


def paged(*options, write=False, cache_dtype=None):
    """Makes a call of paged attention with tensors for some of its options."""

    def make(ops):
        step = scene([(3, 5), (1, 40), (0, 0), (17, 17)], cache_dtype=cache_dtype)
        known = step.options | {"alibi_slopes": torch.rand(4), "sinks": torch.randn(4)}
        names = [*step.options, *options]
        given = [*step.arguments]
        if write:
            key, value, slots = new_tokens(step)
            given[1:1] = [key, value]
            given.insert(5, slots)
        op = ops.paged_attention_ if write else ops.paged_attention

        def call(*given):
            positional, tensors = given[: -len(names) or None], given[len(given) - len(names) :]
            return op(*positional, **dict(zip(names, tensors, strict=True)))

        return [*given, *(known[name] for name in names)], call

    return make


WITH_ALL_TENSORS = paged("alibi_slopes", "sinks", write=True, cache_dtype=torch.int8)


def multiply(ops):
    weight, bias = packed_linear.pack(torch.randn(48, 64)), torch.randn(48)
    return [torch.randn(9, 64), weight, bias], lambda *given: [ops.packed_linear(*given)]


def multiply_all(ops):
    weights = [packed_linear.pack_bf16(torch.randn(n, 64).bfloat16().float()) for n in (48, 16, 32)]
    return [torch.randn(5, 64), *weights], lambda x, *given: ops.packed_linears(x, [*given])


def multiply_gated(ops):
    weights = [packed_linear.pack(torch.randn(48, 64)) for _ in range(2)]
    return [torch.randn(3, 64), *weights], lambda x, *given: [ops.packed_swiglu(x, [*given])]


def multiply_quantised(ops, int8_inputs):
    both = [arguments(quantised_layer("Q4_K", 48, 256, seed)[0]) for seed in range(2)]

    def call(x, *given):
        lists = [[*pair] for pair in zip(given[:3], given[3:], strict=True)]
        return [ops.quantised_swiglu(x, *lists, [], int8_inputs)]

    return [torch.randn(3, 256).bfloat16(), *both[0], *both[1]], call


def look_up_quantised(ops):
    layer = arguments(quantised_layer("Q6_K", 48, 256)[0])
    return [*layer, torch.tensor([3, 47, 0])], lambda *given: [ops.quantised_rows(*given, False)]


def look_up(ops, pack=packed_linear.pack):
    weight = pack(torch.randn(48, 64).bfloat16().float())
    return [weight, torch.tensor([3, 47, 0])], lambda *given: [ops.packed_rows(*given)]


CALLS = {
    "attend": paged(),
    "attend with options": paged("alibi_slopes", "sinks"),
    "attend, int8": paged(cache_dtype=torch.int8),
    "write": paged(write=True),
    "write, int8": paged(write=True, cache_dtype=torch.int8),
    "write with all tensors": WITH_ALL_TENSORS,
    "linear": multiply,
    "linears": multiply_all,
    "swiglu": multiply_gated,
    "swiglu of 4 bits": partial(multiply_quantised, int8_inputs=False),
    "swiglu of 4 bits, int8 inputs": partial(multiply_quantised, int8_inputs=True),
    "rows": look_up,
    "rows of bf16-widen": partial(look_up, pack=packed_linear.pack_bf16),
    "rows of 6 bits": look_up_quantised,
}


def are_equal(a, b):
    """Bit for bit: caches hold NaN where nothing may be read."""
    return torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))


@pytest.mark.parametrize("make", CALLS.values(), ids=CALLS)
def test_a_recorded_call_does_the_same_in_other_memory(ops, replayer, make):
    torch.manual_seed(0)
    assert_moved(ops, replayer, make)


def test_the_call_with_everything_has_every_tensor_of_the_schema(ops):
    given, _ = WITH_ALL_TENSORS(ops)
    arguments, _ = schemas()["paged_attention_"].split("->")
    assert sum(isinstance(each, torch.Tensor) for each in given) == arguments.count("Tensor")


def assert_moved(ops, replayer, make):
    """Records a call and replays it with all arguments and results elsewhere."""
    given, call = make(ops)
    moved = [each.clone() if isinstance(each, torch.Tensor) else each for each in given]
    with replayer.recording() as last_call:
        made = [*call(*given)]
        words, addresses = last_call()
        assert last_call() is None
    other = [torch.full_like(each, 7) for each in made]
    where = {a.data_ptr(): b for a, b in zip((*given, *made), (*moved, *other), strict=True)
             if isinstance(a, torch.Tensor)}  # fmt: skip
    calls = [len(words) + 1, *words]
    assert {words[at] for at in addresses} == {*where}
    for at in addresses:
        calls[1 + at] = where[words[at]].data_ptr()
    replayer.replay(np.array(calls, np.int64))
    for a, b in zip((*made, *given), (*other, *moved), strict=True):
        assert are_equal(a, b) if isinstance(a, torch.Tensor) else a == b


def test_nothing_is_recorded_unless_enabled(ops, replayer):
    given, call = multiply(ops)
    with replayer.recording() as last_call:
        pass
    call(*given)
    assert last_call() is None
    with replayer.recording() as last_call:
        assert last_call() is None


def test_an_op_that_fails_records_nothing(ops, replayer):
    weight = packed_linear.pack(torch.randn(48, 64))
    with replayer.recording() as last_call:
        with pytest.raises(RuntimeError, match="look up rows"):
            ops.packed_rows(weight, torch.tensor([48]))
        assert last_call() is None


def test_a_replay_ends_with_the_first_call_that_fails(ops, replayer):
    given, call = look_up(ops)
    with replayer.recording() as last_call:
        (made,) = call(*given)
        one, _ = last_call()
        (after,) = call(*given)
        two, _ = last_call()
    made.zero_(), after.zero_()
    given[1][1] = 48
    calls = np.array([len(one) + 1, *one, len(two) + 1, *two], np.int64)
    with pytest.raises(RuntimeError, match=r"packed_rows: expected ids in 0\.\.47, got 48"):
        replayer.replay(calls)
    assert not made.any() and not after.any()
    given[1][1] = 47
    replayer.replay(calls)
    assert torch.equal(made, after) and made.any()


def test_words_reach_a_function_as_they_are(replayer):
    seen = []
    kind = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 20)
    function = kind(lambda *words: seen.append(words))
    words = [replayer.entry, ctypes.cast(function, ctypes.c_void_p).value, *range(-10, 10)]
    words += [99] * (replayer.max_args + 2 - len(words))
    replayer.replay(np.array([len(words) + 1, *words] * 2, np.int64))
    assert seen == [tuple(range(-10, 10))] * 2


class Block(nn.Module):
    """Attention and layers between kernels of inductor, which write to a cache."""

    def __init__(self, ops, step):
        super().__init__()
        self.ops, self.step = ops, step
        self.key, self.value = nn.Buffer(step.key_cache), nn.Buffer(step.value_cache)
        self.weight = nn.Buffer(packed_linear.pack(torch.randn(64, 64)))

    def forward(self, query, table, lengths, starts):
        for _ in range(2):
            attended, lse = torch.ops.compiled_attn.paged_attention(
                query, self.key, self.value, table, lengths, starts, self.step.scale
            )
            rows = torch.relu(attended.flatten(1)) * lse.clamp_min(0).mean()
            rows = torch.ops.compiled_attn.packed_linear(rows, self.weight)
            query = torch.tanh(rows).unflatten(1, (4, 16)) + query
            self.key[:, 0] *= 0.5
        return query


def test_a_replayed_graph_with_ops_equals_eager(ops, replayer):
    torch.manual_seed(0)
    step = scene([(3, 5), (1, 40), (17, 17)])
    inputs = [step.query, *step.step[:3]]
    module = Block(ops, step)
    replays = Replays(replayer)
    graph = capture(module, inputs, replays=replays)
    assert (replays.recorded, replays.refused) == (1, {})
    for _ in range(3):
        inputs[0] = torch.randn_like(inputs[0])
        inputs[1] = inputs[1].clone()
        before = module.key.clone()
        expected = module(*inputs)
        after = module.key.clone()
        module.key.copy_(before)
        torch.testing.assert_close(graph.run(*inputs), expected, equal_nan=False)
        torch.testing.assert_close(module.key, after, equal_nan=True)


def test_a_step_that_an_op_refuses_is_refused_with_its_words(ops, replayer):
    step = scene([(3, 5), (1, 40), (17, 17)])  # inductor's cache has the graph
    inputs = [step.query, *step.step[:3]]
    module = Block(ops, step)
    graph = capture(module, inputs, replays=(replays := Replays(replayer)))
    assert replays.recorded == 1
    good, keys = graph.run(*inputs), module.key.clone()
    bad = inputs[1].clone()
    bad[1, 0] = 10**6
    with pytest.raises(RuntimeError, match=r"block_table\[1, 0\] in 0\.\."):
        graph.run(inputs[0], bad, *inputs[2:])
    assert are_equal(module.key, keys)
    assert good.isfinite().all() and graph.run(*inputs).isfinite().all()


@torch.library.custom_op("replay_tests::scaled", mutates_args=())
def scaled(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Calls an op that records its call, and does something more."""
    return torch.ops.compiled_attn.packed_linear(x, weight) * 2


@scaled.register_fake
def _(x, weight):
    return x.new_empty(len(x), weight.shape[0] * 16)


def test_an_op_that_calls_ours_and_does_more_is_not_taken_for_it(ops, replayer):
    weight, x = packed_linear.pack(torch.randn(48, 64)), torch.randn(5, 64)
    replays = Replays(replayer)

    def step(x, weight):
        first = torch.relu(torch.ops.compiled_attn.packed_linear(x, weight))
        return first + torch.ops.replay_tests.scaled(x, weight)

    graph = capture(step, [x, weight], replays=replays)
    assert replays.recorded == 0 and "replay_tests.scaled" in next(iter(replays.refused))
    y = torch.randn(5, 64)
    torch.testing.assert_close(graph.run(y, weight), step(y, weight))


def test_replayed_calls_are_not_recorded(ops, replayer):
    given, call = multiply(ops)
    with replayer.recording() as last_call:
        (made,) = call(*given)
        words, _ = last_call()
        expected = made.clone()
        replayer.replay(np.array([len(words) + 1, *words], np.int64))
        assert last_call() is None
    assert torch.equal(made, expected)


def test_the_replayer_has_the_methods_that_graphs_call(replayer):
    assert isinstance(replayer, NativeReplayer) and load("reference").replayer() is None
    assert {*vars(ReplayerDouble)} - {"__init__", "__module__", "__doc__"} <= {*dir(replayer)} | {
        "__dict__", "__weakref__", "__annotations__",
    }  # fmt: skip
