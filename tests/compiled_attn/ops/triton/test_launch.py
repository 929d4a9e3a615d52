"""What a device asks of a launch: nothing is read on the host, nothing bad reaches memory."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from compiled_attn.ops import KernelArgumentError, NativeOps
from compiled_attn.ops.triton.arguments import attend_launch, problem_of
from compiled_attn.ops.triton.tiles import Chip, plan
from tests.compiled_attn.ops.kernels import TRITON, loaded
from tests.compiled_attn.ops.native_cases import MIXED
from tests.compiled_attn.ops.native_scene import assert_right, new_tokens, scene
from tests.compiled_attn.ops.test_reference import BAD_SHAPES
from tests.compiled_attn.ops.triton.scenes import call_of
from tests.slow import slow_but


@pytest.fixture(scope="module")
def ops() -> NativeOps:
    return loaded(TRITON)


def test_a_launch_is_that_of_the_sizes_alone():
    """Tensors without memory have all that it needs, so a captured graph serves any numbers."""
    step = scene(MIXED, padding=2, padded_requests=1)
    here = call_of(step)
    tensors = {k: v for k, v in here._asdict().items() if isinstance(v, torch.Tensor)}
    call = here._replace(**{name: each.to("meta") for name, each in tensors.items()})
    out, lse = call.query.new_empty(14, 4, 16), call.query.new_empty(14, 4)
    chosen = plan(problem_of(call), Chip(1, is_hopper=False))
    launch = attend_launch(call, chosen, (out, lse, None), widen=False, has_fp8=False)
    queries = launch.arguments["ROWS"] // launch.arguments["TILE_HEADS"]
    assert launch.grid == (14 // queries + 6, 2, 1)
    again = scene([(3, 3), (9, 90)], padding=2, padded_requests=4)
    again.block_table = again.block_table[:, : step.block_table.shape[1]]
    assert problem_of(call_of(again)) == problem_of(here)


class NoNumbers(TorchDispatchMode):
    """Refuses to bring a number to the host."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_no_number_is_brought_to_the_host(ops):
    step = scene(MIXED, padding=2, poison=0.5)
    key, value, slots = new_tokens(step)
    with NoNumbers():
        result = ops.paged_attention_(
            step.query, key, value, step.key_cache, step.value_cache, slots, *step.step
        )
    assert_right(result, step)


@pytest.mark.parametrize("name", slow_but(("a flat cache", "sinks of float64"), BAD_SHAPES))
def test_arguments_that_do_not_fit_say_what_was_expected(ops, name):
    step = scene(MIXED)
    BAD_SHAPES[name](step)
    with pytest.raises(KernelArgumentError, match=r"paged_attention: expected .*, got .*: "):
        ops.paged_attention(*step.arguments, **step.options)


def test_float64_is_refused(ops):
    step = scene(MIXED)
    step.query, step.key_cache, step.value_cache = (
        each.double() for each in (step.query, step.key_cache, step.value_cache)
    )
    with pytest.raises(KernelArgumentError, match="expected a query of float32, bfloat16 or float"):
        ops.paged_attention(*step.arguments)


BAD = {
    "a block too large": lambda s: s.block_table.__setitem__((1, 0), 10**6),
    "a negative block": lambda s: s.block_table.__setitem__((1, 0), -1),
    "a length": lambda s: s.seq_lens.__setitem__(1, 2**31 - 1),
    "a negative length": lambda s: s.seq_lens.__setitem__(1, -1),
}


@pytest.mark.parametrize("size", [4, 64])
@pytest.mark.parametrize("name", BAD)
def test_a_number_out_of_range_makes_nan_of_its_request_alone(ops, name, size):
    step = scene(MIXED, size=size)
    want, _ = ops.paged_attention(*step.arguments)
    BAD[name](step)
    out, lse = ops.paged_attention(*step.arguments)
    begin, end = step.query_start_loc[1:3].tolist()
    assert out[begin:end].isnan().all() and lse[begin:end].isnan().all()
    assert torch.equal(out[:begin], want[:begin]) and torch.equal(out[end:], want[end:])


def test_slots_out_of_range_are_not_written(ops):
    step = scene(MIXED, poison=0.5)
    key, value, slots = new_tokens(step)
    slots[3], slots[4] = -1, step.key_cache.shape[0] * step.key_cache.shape[1]
    keys, values = step.key_cache.clone(), step.value_cache.clone()
    ops.paged_attention_(
        step.query, key, value, step.key_cache, step.value_cache, slots, *step.step
    )
    written = torch.zeros(keys.shape[0] * keys.shape[1], dtype=torch.bool)
    written[torch.cat([slots[:3], slots[5:]])] = True
    for cache, before in ((step.key_cache, keys), (step.value_cache, values)):
        assert torch.equal(cache.flatten(0, 1)[~written], before.flatten(0, 1)[~written])


def test_a_neighbour_changes_no_bit(ops):
    step = scene(MIXED, size=8)
    want, want_lse = ops.paged_attention(*step.arguments)
    step.query[0] *= 3
    step.key_cache[step.block_table[0, 0]] = torch.nan
    step.seq_lens[0] = 5
    out, lse = ops.paged_attention(*step.arguments)
    assert torch.equal(out[1:], want[1:]) and torch.equal(lse[1:], want_lse[1:])
