"""The kernel for prompts, interpreted: results, isolation, what it refuses."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compiled_attn.ops.call import NewTokens, PagedCall
from compiled_attn.ops.providers import descriptors, flash
from compiled_attn.ops.triton.tiles import Plan, Tile
from tests.compiled_attn.ops.kernels import interpreted
from tests.compiled_attn.ops.native_cases import MIXED
from tests.compiled_attn.ops.native_scene import Scene, assert_right, scene

SMALL = Tile(16, 16, 4, 2)
BF16: dict[str, Any] = {"dtype": torch.bfloat16, "size": 16}
DENSE: dict[str, Any] = {"dtype": torch.bfloat16, "size": 4}  # pages are no whole tiles
KINDS = [pytest.param(False, id="pipelined"), pytest.param(True, id="specialized")]
LONG = [(20, 50), (1, 33), (33, 33), (2, 17), (0, 9)]


def with_new_tokens(step: Scene) -> PagedCall:
    """The call, with the new tokens that its caches hold; padding has NaN."""
    page, rows = step.key_cache.shape[1], range(step.query.shape[0])
    kv_heads = step.key_cache.shape[2]
    new = [
        torch.full((len(rows), kv_heads, cache.shape[3]), math.nan, dtype=cache.dtype)
        for cache in (step.key_cache, step.value_cache)
    ]
    starts = step.query_start_loc.tolist()
    for request, length in enumerate(step.seq_lens.tolist()):
        for row in range(*starts[request : request + 2]):
            at = length - starts[request + 1] + row
            block = step.block_table[request, at // page]
            for each, cache in zip(new, (step.key_cache, step.value_cache), strict=True):
                each[row] = cache[block, at % page]
    return step.call._replace(new=NewTokens(*new, torch.zeros(len(rows), dtype=torch.int64)))


def computed(call: PagedCall, specialized: bool, tile: Tile = SMALL) -> tuple[Tensor, Tensor]:
    """The results of the kernel, with the context of small pages by the paged kernel."""
    interpreted()
    from compiled_attn.ops.triton.launch import attend as paged
    from compiled_attn.ops.triton.prompt_launch import attend

    plan = Plan(SMALL, 1)
    return attend(call, partial(_paged, paged, plan), tile, specialized=specialized)


def _paged(attend: Callable[..., Any], plan: Plan, call: PagedCall) -> Any:
    return attend(call, plan)


@pytest.mark.parametrize("specialized", KINDS)
@pytest.mark.parametrize("case", [BF16, DENSE], ids=["pages", "new tokens"])
def test_a_mixed_step_is_right_and_no_poison_reaches_it(case, specialized):
    """Free slots, padding and the rows after the last are NaN."""
    step = scene(MIXED, padding=3, padded_requests=2, **case)
    assert_right(computed(with_new_tokens(step), specialized), step)


@pytest.mark.parametrize("specialized", KINDS)
@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("case", [BF16, DENSE], ids=["pages", "new tokens"])
def test_a_row_does_not_see_what_comes_after_it(case, poison, specialized):
    """A value of a later token that is not finite reaches no row before it, and each after it."""
    step = scene([(12, 12), (5, 30)], **case)
    want, want_lse = computed(with_new_tokens(step), specialized)
    page = step.value_cache.shape[1]
    step.value_cache[step.block_table[0, 9 // page], 9 % page] = poison
    out, lse = computed(with_new_tokens(step), specialized)
    before = torch.tensor([*range(9), *range(12, 17)])
    assert torch.equal(out[before], want[before]) and torch.equal(lse[before], want_lse[before])
    assert not out[9:12].isfinite().any()


@pytest.mark.parametrize("specialized", KINDS)
def test_a_block_that_is_not_in_the_cache_makes_nan_of_its_request_alone(specialized):
    step = scene(LONG, **BF16)
    want, _ = computed(with_new_tokens(step), specialized)
    call = with_new_tokens(step)
    step.block_table[2, 0] = 10**6
    out, lse = computed(call, specialized)
    begin, end = step.query_start_loc[2:4].tolist()
    assert out[begin:end].isnan().all() and lse[begin:end].isnan().all()
    assert torch.equal(out[:begin], want[:begin]) and torch.equal(out[end:], want[end:])
    call = call._replace(seq_lens=torch.tensor([50, -1, 2**31 - 1, 17, 9]).int())
    out, _ = computed(call, specialized)
    assert out[20:54].isnan().all() and torch.equal(out[54:], want[54:])


@pytest.mark.parametrize("case", [BF16, DENSE], ids=["pages", "new tokens"])
@pytest.mark.parametrize("changes", [{"scale": 1e-30 / 3}, {"scale": 3e9}])
def test_scales_may_be_small_and_scores_large(case, changes):
    step = scene([(4, 20), (1, 9)], **case)
    step.scale = changes["scale"]
    out, lse = computed(with_new_tokens(step), False)
    assert out.isfinite().all() and lse.isfinite().all()


CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "float32": ({"dtype": torch.float32}, "computes in float16 and bfloat16"),
    "codes": ({**BF16, "cache_dtype": torch.int8}, "has no cache of torch.int8"),
    "window": ({**BF16, "window": 3}, "has no window"),
    "softcap": ({**BF16, "softcap": 3.0, "alibi_slopes": torch.ones(4)},
                "has no softcap and no ALiBi"),
    "value size": ({**BF16, "value_dim": 8}, "has values of the head size of keys, 16, not 8"),
    "head size": ({**BF16, "dim": 12}, "has head sizes that 8 divides"),
    "small pages": (DENSE, "needs the new keys and values next to pages of 4"),
    "rows": ({**BF16, "layout": "strided", "size": 128}, "needs rows of key_cache at multiples"),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_what_it_cannot_compute_has_a_reason(name):
    interpreted()
    from compiled_attn.ops.triton.prompt_launch import why_not

    case, reason = CALLS[name]
    assert reason in str(why_not(scene(MIXED, **case).call))


def test_what_it_can_compute_has_none():
    interpreted()
    from compiled_attn.ops.triton.prompt_launch import why_not

    assert why_not(scene(MIXED, **{**BF16, "size": 64}).call) is None
    assert why_not(with_new_tokens(scene(MIXED, **DENSE))) is None
    with_sinks = with_new_tokens(scene(MIXED, **DENSE, sinks=torch.ones(4)))
    assert why_not(with_sinks) == "has no sinks with pages of 4"


def test_launches_depend_on_sizes_alone():
    """Tensors without memory have all that they need, so a captured graph serves any numbers."""
    interpreted()
    from compiled_attn.ops.triton.prompt_launch import launches

    call = scene(MIXED, **BF16).call
    tensors = {k: v for k, v in call._asdict().items() if isinstance(v, Tensor)}
    call = call._replace(**{name: each.to("meta") for name, each in tensors.items()})
    results = call.query.new_empty(call.query.shape), call.query.new_empty(call.query.shape[:2])
    first, second = launches(call, SMALL, results, specialized=True, widen=False)
    assert first.grid == second.grid == (call.query.shape[0] // 8 + len(call.seq_lens), 2)
    assert first.arguments["SPECIALIZED"] and second.arguments["REPAIRS"]


@settings(max_examples=10, deadline=None)
@given(
    requests=st.lists(
        st.tuples(st.sampled_from([1, 1, 2, 5, 17, 40]), st.integers(0, 50)), max_size=4
    ),
    tile=st.tuples(st.sampled_from([16, 32]), st.sampled_from([16, 32])),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 2), (5, 1)]),
    dim=st.sampled_from([16, 24, 72]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    size=st.sampled_from([1, 5, 16, 32, 48]),
    causal=st.booleans(),
    with_sinks=st.booleans(),
    layout=st.sampled_from(["NHD", "HND"]),
    padding=st.integers(0, 3),
    specialized=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_random_steps_are_those_of_dense_attention(
    requests, tile, heads, dim, dtype, size, causal, with_sinks, layout, padding, specialized, seed
):
    has_sinks = with_sinks and size % tile[1] == 0
    sinks = torch.linspace(-1, 1, heads[0]) if has_sinks else None
    step = scene(
        [(new, new + before) for new, before in requests], heads=heads[0], kv_heads=heads[1],
        dim=dim, size=size, dtype=dtype, layout=layout, padding=padding, padded_requests=padding,
        seed=seed, sinks=sinks, causal=causal,
    )  # fmt: skip
    assert_right(computed(with_new_tokens(step), specialized, Tile(*tile, 4, 2)), step)


@pytest.mark.parametrize(
    ("specialized", "capability", "dim", "reason"),
    [
        (False, (8, 0), 16, "needs sm_90 or later, not sm_80"),
        (True, (10, 0), 16, "has specialised warps on sm_90, not on sm_100"),
        (True, (9, 0), 256, "has head sizes up to 128 on sm_90, not 256"),
        (False, (12, 0), 256, "has head sizes up to 128 on sm_120, not 256"),
        (True, (9, 0), 16, None),
        (False, (12, 0), 16, None),
    ],
)
def test_a_device_may_lack_what_it_needs(monkeypatch, specialized, capability, dim, reason):
    interpreted()
    kernel = descriptors.Descriptors("descriptors", specialized=specialized)
    call = scene([(2, 5)], **{**BF16, "size": 128, "dim": dim}).call
    assert kernel.why_not(call) == "runs on NVIDIA's devices, not on cpu"
    monkeypatch.setattr(flash, "capability", lambda _: capability)
    monkeypatch.setattr(flash, "lacks_device", lambda _: None)
    monkeypatch.setattr("triton.__version__", "3.9.1")
    assert kernel.why_not(call) == reason
    monkeypatch.setattr("triton.__version__", "3.6.0")  # its compiler would end the process
    old = "needs Triton 3.9 or newer, not 3.6.0" if specialized else None
    assert kernel.why_not(call) == (reason or old)
