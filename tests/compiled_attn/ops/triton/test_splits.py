"""Splits of the keys: one launch merges them, in whatever order its programs run."""

from __future__ import annotations

import random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from compiled_attn.ops.triton.tiles import Plan, Tile
from tests.compiled_attn.ops.kernels import interpreted
from tests.compiled_attn.ops.native_scene import Scene, assert_right, new_tokens, scene
from tests.slow import slow_but

SPLIT = Plan(Tile(16, 16, 4, 1), 5)


@pytest.fixture(scope="module")
def launch():
    interpreted()
    from compiled_attn.ops.triton import launch

    return launch


@pytest.fixture
def order(monkeypatch) -> list[random.Random]:
    """Programs run in an order drawn by the generator that a test puts here."""
    from triton.runtime.interpreter import interpreter_builder as builder

    generators: list[random.Random] = []
    start_grid, start_program = builder.set_grid_dim, builder.set_grid_idx
    programs: list[tuple[int, int, int]] = []

    def set_grid_dim(x: int, y: int, z: int) -> None:
        programs[:] = [(a, b, c) for a in range(x) for b in range(y) for c in range(z)]
        if generators:
            generators[-1].shuffle(programs)
        start_grid(x, y, z)

    monkeypatch.setattr(builder, "set_grid_dim", set_grid_dim)
    monkeypatch.setattr(builder, "set_grid_idx", lambda *_: start_program(*programs.pop()))
    return generators


def _mixed() -> Scene:
    """Rows of no request, empty splits, a request without keys of its own, and sinks."""
    requests = [(1, 70), (5, 41), (1, 3), (9, 9)]
    sinks = torch.tensor([0.3, -1.0, 2.0, 0.0])
    return scene(requests, size=8, padding=3, padded_requests=1, sinks=sinks)


def test_the_order_in_which_splits_arrive_changes_no_bit(launch, order):
    step = _mixed()
    want = launch.attend(step.call, SPLIT)
    assert_right(want, step)
    for seed in range(2):
        order.append(random.Random(seed))
        for one, other in zip(launch.attend(step.call, SPLIT), want, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("name", slow_but(("value",), ("block", "length", "value")))
def test_what_one_split_must_not_read_makes_nan_in_any_order(launch, order, name):
    step = _mixed()
    if name == "block":
        step.block_table[0, 4] = 10**6
    elif name == "length":
        step.seq_lens[0] = -1
    else:
        step.value_cache[step.block_table[0, 4]] = torch.nan
    for seed in range(3):
        order.append(random.Random(seed))
        out, lse = launch.attend(step.call, SPLIT)
        assert out[0].isnan().all()
        assert not out[1:].isnan().any() and not lse[1:].isnan().any()


class Called(TorchDispatchMode):
    """The ops of torch that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_a_step_that_writes_takes_two_launches(launch, monkeypatch):
    """The write zeroes the counters, so nothing else runs on the device."""
    step = scene([(1, 300)], size=16, poison=0.5)
    key, value, slots = new_tokens(step)
    kernels, run = [], launch._run

    def count(kernel, made):
        kernels.append(kernel)
        with torch.utils._python_dispatch._disable_current_modes():
            run(kernel, made)

    monkeypatch.setattr(launch, "_run", count)
    monkeypatch.setattr(launch, "_plan_of", lambda _: SPLIT)
    with Called() as called:
        result = launch.paged_attention_(
            step.query, key, value, step.key_cache, step.value_cache, slots, *step.step
        )
    assert_right(result, step)
    assert kernels == [launch.write_kernel, launch.attend_kernel]
    assert {"zero_", "fill_", "zeros", "new_zeros"}.isdisjoint(called.names)
    launch.paged_attention(*step.arguments)
    assert kernels[2:] == [launch.attend_kernel]
