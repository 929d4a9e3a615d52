from __future__ import annotations

import inspect
import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode

from compiled_attn.attention.merge import merge
from compiled_attn.attention.state import PartialAttention
from compiled_attn.compat.flash import flash_attn_with_kvcache, flash_attn_with_kvcache_reference
from compiled_attn.compat.flash.key_slice import attend_fused, attend_plain, attend_sdpa
from tests.compiled_attn.compat.flash.cases import Case, check
from tests.slow import slow_but

CACHES = ("k_cache", "v_cache")
HALVES = (torch.float16, torch.bfloat16)
FLOATS = (torch.float32, *HALVES, torch.float64)
FA2 = (
    "q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad "
    "block_table softmax_scale causal window_size softcap rotary_interleaved alibi_slopes "
    "num_splits return_softmax_lse"
)
SHAPES = [(1, 128), (1, 339), (3, 384), (8, 800), (16, 130), (3, 799), (32, 64), (48, 48)]


def upstream(seed: int) -> Case:
    """One point of the grid of FlashAttention's own test, without what it skips."""
    rng = random.Random(seed)
    queries, keys = rng.choice(SHAPES)
    local, causal = rng.random() < 0.5, rng.random() < 0.5
    same, dim = rng.random() < 0.5, rng.choice([32, 59, 64, 80, 128, 256])
    new = None
    if rng.random() < 0.7:
        new = queries if same else rng.randint(1, queries)
    page_size = rng.choice([None, None, 256, 16])
    rotary = 0 if new is None else int(rng.choice([0, 0.5, 1]) * dim) // 16 * 16
    alibi = rng.choice([None, None, "rows"])
    return Case(
        seed=seed,
        dtype=rng.choice([torch.float32, *HALVES]),
        queries=queries,
        new=new,
        heads=6,
        kv_heads=rng.choice([6, 1, 3]),
        dim=dim,
        capacity=keys,
        page_size=page_size,
        leftpad=rng.random() < 0.4,
        batch_idx=rng.random() < 0.4,
        causal=causal,
        window=(rng.randrange(keys), rng.randrange(keys)) if local else (-1, -1),
        alibi=alibi,
        rotary=rotary,
        interleaved=rng.random() < 0.5,
        splits=rng.choice([1, 0]),
        softcap=rng.choice([0.0, 0.0, 15.0]),
    ).make()


@pytest.mark.parametrize("seed", slow_but(range(12), range(48)))
def test_the_grid_of_upstreams_test_holds_its_tolerance(seed: int) -> None:
    check(upstream(seed), flash_attn_with_kvcache)


@st.composite
def cases(draw: Any) -> Case:
    kv_heads, group = draw(st.sampled_from([(1, 1), (1, 4), (2, 1), (2, 3), (3, 2)]))
    new = draw(st.one_of(st.none(), st.integers(0, 5)))
    queries = draw(st.integers(1, 6))
    rotary = draw(st.sampled_from([0, 0, 16, 32])) if new is not None else 0
    side = st.integers(-1, 12)
    return Case(
        seed=draw(st.integers(0, 10**6)),
        dtype=draw(st.sampled_from(FLOATS)),
        index_dtype=draw(st.sampled_from([torch.int32, torch.int64])),
        batch=draw(st.integers(1, 4)),
        queries=queries,
        new=new,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        dim=draw(st.sampled_from([8, 16, 31, 40]))
        if rotary == 0
        else draw(st.sampled_from([32, 40])),
        capacity=draw(st.integers(8, 30)),
        page_size=draw(st.sampled_from([None, None, 1, 3, 7, 16, 256])),
        leftpad=draw(st.booleans()),
        batch_idx=draw(st.booleans()),
        storage=draw(
            st.sampled_from(["plain", "fused", "layers", "transposed", "interleaved heads"])
        ),
        causal=draw(st.booleans()),
        window=(draw(side), draw(side)),
        softcap=draw(st.sampled_from([0.0, 0.0, 2.0])),
        alibi=draw(st.sampled_from([None, "heads", "rows"])),
        rotary=rotary,
        interleaved=draw(st.booleans()),
        scale=draw(st.sampled_from([None, 0.5])),
        splits=draw(st.sampled_from([0, 0, 1, 2, 3, 128])),
    ).make()


@pytest.mark.parametrize("call", [flash_attn_with_kvcache, flash_attn_with_kvcache_reference])
@given(case=cases())
def test_any_combination_equals_the_oracle_amid_poison(call: Any, case: Case) -> None:
    check(case, call)


@pytest.mark.parametrize(
    "sizes",
    [
        {"queries": 2, "new": 9, "window": (1, 0), "lengths": [3, 8], "page_size": 4},
        {"queries": 0, "new": 2, "page_size": 4, "dim": 32, "rotary": 16, "causal": True},
        {"queries": 0, "softcap": 2.0, "splits": 3},
    ],
    ids=["hidden new tokens", "no query", "no query in splits"],
)
def test_an_edge_equals_the_oracle(sizes: dict[str, Any]) -> None:
    check(Case(**sizes).make(), flash_attn_with_kvcache)


@pytest.mark.parametrize("form", [attend_plain, attend_fused, attend_sdpa])
@pytest.mark.parametrize("seed", slow_but(range(6), range(12)))
def test_every_form_of_the_slice_equals_the_oracle(form, seed, monkeypatch):
    case = upstream(seed)
    if form is attend_sdpa and case.softcap:
        case.softcap = case.args["softcap"] = 0.0
    monkeypatch.setattr("compiled_attn.compat.flash.forward.select_attend", lambda *_: form)
    check(case, flash_attn_with_kvcache, num_splits=seed % 4)


def test_the_signature_is_that_of_fa2_in_order_and_defaults() -> None:
    parameters = inspect.signature(flash_attn_with_kvcache).parameters
    own = parameters["kernel"]
    assert (own.kind, own.default) == (own.KEYWORD_ONLY, "auto")
    parameters = {name: p for name, p in parameters.items() if name != "kernel"}
    assert list(parameters) == FA2.split()
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters.values())
    given = {name: p.default for name, p in parameters.items() if p.default not in (None, p.empty)}
    assert given == {
        "causal": False,
        "window_size": (-1, -1),
        "softcap": 0.0,
        "rotary_interleaved": True,
        "num_splits": 0,
        "return_softmax_lse": False,
    }


def test_a_bare_tensor_comes_back_unless_the_lse_is_asked_for() -> None:
    case = Case().make()
    out, _ = case.run(flash_attn_with_kvcache)
    assert torch.equal(flash_attn_with_kvcache(**case.args), out)


def visible(queries: int, keys: int, **options: Any) -> list[str]:
    """Who sees whom, read off the outputs: value j is the unit vector j, all scores are equal."""
    cache = torch.eye(keys).view(1, keys, 1, keys)
    q = torch.zeros(1, queries, 1, keys)
    out = flash_attn_with_kvcache(q, cache, cache.clone(), cache_seqlens=keys, **options)
    assert isinstance(out, Tensor)
    return ["".join("1" if weight > 0 else "0" for weight in row) for row in out[0, :, 0]]


def test_masks_are_aligned_to_the_bottom_right() -> None:
    assert visible(2, 5, causal=True) == ["11110", "11111"]
    assert visible(5, 2, causal=True) == ["00", "00", "00", "10", "11"]
    assert visible(2, 5, window_size=(-1, 0)) == ["11110", "11111"]
    assert visible(2, 5, window_size=(1, 0)) == ["00110", "00011"]
    assert visible(2, 5, window_size=(1, 2), causal=True) == ["00110", "00011"]
    assert visible(3, 5, window_size=(0, 1)) == ["00110", "00011", "00001"]
    assert visible(3, 5, window_size=(1, -1)) == ["01111", "00111", "00011"]
    assert visible(2, 5, window_size=(99, 99)) == ["11111", "11111"]
    assert visible(1, 5, causal=True) == ["11111"]


@pytest.mark.parametrize("splits", [0, 1, 3])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_rows_that_see_nothing_are_zero_with_lse_minus_infinity(splits, softcap):
    case = Case(
        batch=3, queries=4, lengths=[0, 2, 6], causal=True, splits=splits, softcap=softcap
    ).make()
    out, lse = check(case, flash_attn_with_kvcache)
    assert bool((out[0] == 0).all()) and bool((lse[0] == -math.inf).all())
    assert (lse[1, 0] == -math.inf).tolist() == [True, True, False, False]
    assert bool(torch.isfinite(lse[2]).all())


def test_a_row_that_is_all_left_pad_sees_nothing() -> None:
    case = Case(batch=1, lengths=[5]).make()
    pad = torch.tensor([5], dtype=torch.int32)
    out, lse = case.run(flash_attn_with_kvcache, cache_leftpad=pad)
    assert bool((out == 0).all()) and bool((lse == -math.inf).all())


@pytest.mark.parametrize("page_size", [None, 4])
def test_an_int_length_and_a_missing_one_equal_the_tensor(page_size: int | None) -> None:
    case = Case(batch=2, lengths=[24, 24], queries=3, causal=True, page_size=page_size).make()
    out, lse = case.run(flash_attn_with_kvcache)
    for length in (24, None):
        again = case.run(flash_attn_with_kvcache, cache_seqlens=length)
        assert torch.equal(again[0], out) and torch.equal(again[1], lse)


def test_two_rows_may_read_one_cache_row() -> None:
    case = Case(batch=2, lengths=[6, 9], batch_idx=True).make()
    one = case.run(flash_attn_with_kvcache)[0]
    rows = torch.tensor([case.rows[1], case.rows[1]], dtype=torch.int32)
    both = case.run(flash_attn_with_kvcache, cache_batch_idx=rows, cache_seqlens=9)[0]
    assert torch.equal(both[1], one[1])
    same_query = case.args["q"][1:].expand(2, -1, -1, -1)
    both = case.run(flash_attn_with_kvcache, q=same_query, cache_batch_idx=rows, cache_seqlens=9)[0]
    assert torch.equal(both[0], both[1])


def test_the_stride_of_an_axis_of_size_1_does_not_matter() -> None:
    case = Case(dim=1, page_size=24, lengths=[5, 9], new=1).make()
    assert case.table is not None and case.table.shape == (2, 1)
    odd = {}
    for name in (*CACHES, "block_table"):
        swapped = torch.empty_like(case.args[name].mT, memory_format=torch.contiguous_format)
        odd[name] = swapped.mT.copy_(case.args[name])
    assert all(tensor.stride(-1) != 1 for tensor in odd.values())
    out = case.run(flash_attn_with_kvcache, **odd)[0]
    assert torch.equal(case.run(flash_attn_with_kvcache)[0], out)


def test_queries_may_have_any_strides() -> None:
    case = Case(queries=3, new=3, causal=True, lengths=[4, 9]).make()
    out = case.run(flash_attn_with_kvcache)[0]
    odd = {n: case.args[n].transpose(1, 3).contiguous().transpose(1, 3) for n in ("q", "k", "v")}
    assert odd["q"].stride(-1) != 1
    assert torch.equal(case.run(flash_attn_with_kvcache, **odd)[0], out)


def test_without_causality_all_queries_turn_as_the_first_new_token() -> None:
    case = Case(queries=3, new=3, dim=32, rotary=32, lengths=[4, 9]).make()
    check(case, flash_attn_with_kvcache)
    case.args["q"] = case.args["q"][:, :1].expand(-1, 3, -1, -1)
    out = case.run(flash_attn_with_kvcache)[0]
    assert torch.equal(out[:, 0], out[:, 2])
    out = case.run(flash_attn_with_kvcache, window_size=(-1, 2))[0]
    assert not torch.allclose(out[:, 0], out[:, 2], atol=1e-3)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("queries", [1, 7])
def test_splits_change_nothing_but_rounding(dtype: torch.dtype, queries: int) -> None:
    case = Case(dtype=dtype, queries=queries, capacity=90, page_size=7, causal=True).make()
    out, lse = case.run(flash_attn_with_kvcache, num_splits=1)
    close = {torch.bfloat16: 2e-2, torch.float16: 2e-3}.get(dtype, 1e-6)
    for splits in (0, 2, 5, 90, 128):
        again, again_lse = case.run(flash_attn_with_kvcache, num_splits=splits)
        assert torch.allclose(again, out, atol=close, rtol=close)
        assert torch.allclose(again_lse, lse, atol=1e-5)


@pytest.mark.parametrize("dtype", HALVES)
def test_slices_of_half_precision_are_rounded_once(dtype: torch.dtype) -> None:
    case = Case(dtype=dtype, batch=1, heads=1, kv_heads=1, dim=32, capacity=64, lengths=[64]).make()
    case.v_cache[:, ::2] = -case.v_cache[:, 1::2]  # what the slices add up to nearly cancels
    want = case.expected()[0]
    for splits in (2, 7, 64):
        out = case.run(flash_attn_with_kvcache, num_splits=splits, kernel="portable")[0]
        error = out.double() - want
        assert error.abs().max() <= 1.01 * (want.to(dtype).double() - want).abs().max()


def test_the_heuristic_splits_what_would_need_too_many_scores(monkeypatch):
    case = Case(queries=5, capacity=64, lengths=[64, 40], causal=True).make()
    whole = case.run(flash_attn_with_kvcache)[0]
    calls: list[int] = []

    def counting(s: Any) -> PartialAttention:
        calls.append(s.key.shape[1])
        return attend_plain(s)

    monkeypatch.setattr("compiled_attn.compat.flash.forward.select_attend", lambda *_: counting)
    monkeypatch.setattr("compiled_attn.compat.flash.forward._SCORES_AT_ONCE", 2 * 4 * 5 * 10)
    out = case.run(flash_attn_with_kvcache, kernel="portable")[0]
    assert torch.allclose(out, whole, atol=1e-6)
    assert sum(calls) == 64 and max(calls) <= 10


def test_results_of_two_halves_merge_by_their_lse() -> None:
    case = Case(batch=2, lengths=[20, 24], queries=2).make()
    whole, _ = case.run(flash_attn_with_kvcache)
    first = case.run(flash_attn_with_kvcache, cache_seqlens=12)
    pads = torch.tensor([12, 12], dtype=torch.int32)
    second = case.run(flash_attn_with_kvcache, cache_leftpad=pads)
    empty = case.run(flash_attn_with_kvcache, cache_seqlens=0)
    parts = [
        PartialAttention(
            out.transpose(1, 2),
            lse.clamp_min(torch.finfo(lse.dtype).min),
            (lse > -math.inf).float(),
        )
        for out, lse in (first, second, empty)
    ]
    assert torch.allclose(merge(*parts).transpose(1, 2), whole, atol=1e-6)


def test_results_do_not_depend_on_neighbours_placement_or_table_width() -> None:
    long = Case(batch=3, lengths=[5, 23, 1], page_size=4, causal=True, queries=2).make()
    out, lse = long.run(flash_attn_with_kvcache)
    assert long.table is not None
    order = torch.randperm(long.pages, generator=long.gen)
    moved = {
        n: torch.empty_like(c) for n, c in (("k_cache", long.k_cache), ("v_cache", long.v_cache))
    }
    moved["k_cache"][order], moved["v_cache"][order] = long.k_cache, long.v_cache
    legal = (long.table >= 0) & (long.table < long.pages)
    table = torch.where(legal, order[long.table.clamp(0, long.pages - 1)].int(), -1)
    again = long.run(flash_attn_with_kvcache, **moved, block_table=table)
    assert torch.equal(again[0], out) and torch.equal(again[1], lse)
    wide = torch.nn.functional.pad(long.table, (0, 9), value=-1)
    assert torch.equal(long.run(flash_attn_with_kvcache, block_table=wide)[0], out)
    lengths = torch.tensor([5], dtype=torch.int32)
    changes = {"q": long.args["q"][:1], "block_table": long.table[:1], "cache_seqlens": lengths}
    alone = long.run(flash_attn_with_kvcache, **changes)
    assert torch.allclose(alone[0][0], out[0], atol=1e-6, rtol=1e-6)


def test_statistics_are_float32_for_half_precision() -> None:
    case = Case(dtype=torch.float16, dim=256, scale=1.0, lengths=[20, 24]).make()
    case.k_cache[torch.isfinite(case.k_cache)] *= 100  # scores far beyond float16's 65504
    case.args["q"] *= 100
    out, lse = case.run(flash_attn_with_kvcache)
    want, want_lse = case.expected()
    assert want_lse.abs().max() > 65504
    assert torch.allclose(lse.double(), want_lse, rtol=1e-5)
    assert torch.allclose(out.double(), want, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("form", [attend_plain, attend_fused, attend_sdpa, None])
@pytest.mark.parametrize("alibi", ["heads", "rows"])
def test_float64_has_the_accuracy_of_float64_under_alibi(form, alibi, monkeypatch):
    case = Case(dtype=torch.float64, queries=3, capacity=60, lengths=[60, 41], alibi=alibi).make()
    case.args["alibi_slopes"] /= 7  # times a distance none of them is a float32
    function = flash_attn_with_kvcache_reference if form is None else flash_attn_with_kvcache
    monkeypatch.setattr("compiled_attn.compat.flash.forward.select_attend", lambda *_: form)
    for got, want in zip(case.run(function), case.expected(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_there_is_no_backward_and_parameters_are_accepted() -> None:
    case = Case(new=1, lengths=[3, 4]).make()
    q = case.args["q"].requires_grad_()
    out, lse = case.run(flash_attn_with_kvcache, q=q, k=case.args["k"].requires_grad_())
    assert not out.requires_grad and not lse.requires_grad


def test_meta_tensors_give_shapes_without_reading_numbers() -> None:
    case = Case(batch=2, queries=3, new=2, page_size=4, causal=True).make()
    meta = {n: a.to("meta") if isinstance(a, Tensor) else a for n, a in case.args.items()}
    out, lse = flash_attn_with_kvcache(**meta, return_softmax_lse=True)
    assert out.shape == (2, 3, 4, 16) and lse.shape == (2, 4, 3)
    with FakeTensorMode() as mode:
        tensors = {n: mode.from_tensor(a) for n, a in case.args.items() if isinstance(a, Tensor)}
        out, lse = flash_attn_with_kvcache(**(case.args | tensors), return_softmax_lse=True)
    assert out.shape == (2, 3, 4, 16) and lse.shape == (2, 4, 3)
