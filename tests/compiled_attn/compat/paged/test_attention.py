"""`paged_attention_v1` and `_v2` against dense float64 attention, with poison about."""

from __future__ import annotations

import dataclasses
import inspect
import math
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compiled_attn.compat.paged import (
    LAYOUTS,
    PARTITION,
    empty_caches,
    paged_attention_reference,
    paged_attention_v1,
    paged_attention_v2,
)
from tests.compiled_attn.compat.paged.scene import Step

FLOATS = [torch.float32, torch.float16, torch.bfloat16]


def _v1(step: Step, **changes) -> Tensor:
    out = torch.full_like(step.query, step.poison)
    return paged_attention_v1(out, *step.args(**changes), layout=step.layout)


def _v2(step: Step, **changes) -> Tensor:
    out = torch.full_like(step.query, step.poison)
    partials = step.partials(PARTITION)
    return paged_attention_v2(out, *partials, *step.args(**changes), layout=step.layout)


def _reference(step: Step) -> Tensor:
    args = step.args()
    some = (*args[:3], step.scale, step.block_tables, step.seq_lens, step.block_size, *args[9:])
    return paged_attention_reference(*some, layout=step.layout)


def steps(**fixed) -> st.SearchStrategy[Step]:
    strategies = {
        "seed": st.integers(0, 2**32),
        "lengths": st.lists(st.integers(0, 40), min_size=1, max_size=5).map(tuple),
        "kv_heads": st.integers(1, 3),
        "group": st.sampled_from([1, 2, 5]),
        "dim": st.sampled_from([16, 48, 80]),
        "block_size": st.sampled_from([1, 3, 7, 8, 16, 64]),
        "layout": st.sampled_from(LAYOUTS),
        "dtype": st.sampled_from(FLOATS),
        "index_dtype": st.sampled_from([torch.int32, torch.int64]),
        "alibi": st.booleans(),
        "extra_width": st.integers(0, 3),
        "poison": st.sampled_from([math.nan, math.inf, -math.inf]),
    }

    def build(group: int, kv_heads: int, **rest) -> Step:
        return Step(heads=group * kv_heads, kv_heads=kv_heads, **rest).make()

    return st.builds(build, **(strategies | {name: st.just(v) for name, v in fixed.items()}))


@given(steps())
def test_every_form_is_exact_over_random_steps(step: Step) -> None:
    step.assert_exact(_v1(step))
    step.assert_exact(_v2(step))
    step.assert_exact(_reference(step))
    # The form of compiled graphs, run eagerly; compiled in tests/graph_breaks/test_paged.py.
    with mock.patch.object(torch.compiler, "is_compiling", return_value=True):
        step.assert_exact(_v1(step))
        step.assert_exact(_v2(step))


def test_where_numbers_cannot_be_read_lost_rows_are_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    # As inside of a captured CUDA graph, where nothing is compiled.
    monkeypatch.setattr("compiled_attn.compat.paged.validation.can_read", lambda _: False)
    step = Step(lengths=(5, 0, 9, 3)).make()
    step.assert_exact(_v1(step))
    step.assert_exact(_v2(step))
    expected = step.expected()
    step.block_tables[2, 1], step.seq_lens[3] = step.blocks, 99
    for version in (_v1, _v2):
        out = version(step)
        assert out[2:].isnan().all()
        torch.testing.assert_close(out[:2].double(), expected[:2], atol=1e-6, rtol=1e-5)


@settings(max_examples=12)
@given(
    steps(dim=16),
    st.lists(st.sampled_from([0, 1, 511, 512, 513, 1030]), min_size=1, max_size=3),
    st.sampled_from([1, 7, 16, 600, 1024]),
)
def test_contexts_across_partitions_are_exact(random: Step, lengths: list, size: int) -> None:
    step = dataclasses.replace(random, lengths=tuple(lengths), block_size=size).make()
    step.assert_exact(_v1(step))
    step.assert_exact(_v2(step))


@pytest.mark.parametrize("version", [_v1, _v2])
@pytest.mark.parametrize(
    ("heads", "dim", "blocks", "scale"),
    [(56, 128, 195, 128**-0.5), (12, 64, 7281, 64**-0.5)],
    ids=["30B", "125M"],
)
def test_the_recorded_shapes_run_as_they_are(version, heads, dim, blocks, scale) -> None:
    key_cache, value_cache = empty_caches(blocks, 16, heads, dim, dtype=torch.float16)
    assert key_cache.shape == (blocks, heads, dim // 8, 16, 8)
    assert value_cache.shape == (blocks, heads, dim, 16)
    small = Step(
        lengths=(204,), heads=heads, kv_heads=heads, dim=dim, block_size=16, extra_blocks=0
    )
    small.extra_width, small.dtype, small.spread = 0, torch.float16, dim**-0.5
    small.make()
    far = [blocks - 1 - 7 * i for i in range(13)]  # only these blocks of the cache are touched
    at = small.block_tables[0].long()
    key_cache[far], value_cache[far] = small.key_cache[at], small.value_cache[at]
    tables = torch.tensor([far], dtype=torch.int32)
    assert (tables.shape, small.seq_lens.tolist()) == ((1, 13), [204])
    changes = {"key_cache": key_cache, "value_cache": value_cache, "block_tables": tables}
    out = version(small, **changes, scale=scale, max_seq_len=204)
    small.assert_exact(out)
    torch.testing.assert_close(out.double(), small.expected(), atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("size", "dim"), [(1, 16), (5, 256), (16, 272), (32, 512), (256, 16)])
def test_head_dims_and_block_sizes_have_no_upper_limit(layout: str, size: int, dim: int) -> None:
    dims = [dim] if layout == "packed" else [dim, dim - 3]  # its x must divide the head dim
    for each in dims:
        step = Step(
            lengths=(33, 1), dim=each, block_size=size, layout=layout, dtype=torch.float16
        ).make()
        step.assert_exact(_v1(step))


def test_double_precision_stays_double() -> None:
    step = Step(dtype=torch.float64, alibi=True).make()
    assert (_v1(step) - step.expected()).abs().max() < 1e-14
    assert (_v2(step) - step.expected()).abs().max() < 1e-14


def test_the_positional_order_is_that_of_the_known_kernels() -> None:
    shared = [
        *("query", "key_cache", "value_cache", "num_kv_heads", "scale", "block_tables"),
        *("seq_lens", "block_size", "max_seq_len", "alibi_slopes", "kv_cache_dtype"),
        *("k_scale", "v_scale", "tp_rank", "blocksparse_local_blocks", "blocksparse_vert_stride"),
        *("blocksparse_block_size", "blocksparse_head_sliding_step"),
    ]

    def positional(function) -> list[str]:
        parameters = inspect.signature(function).parameters.values()
        return [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]

    assert positional(paged_attention_v1) == ["out", *shared]
    partials = ["exp_sum", "max_logits", "tmp_out"]
    assert positional(paged_attention_v2) == ["out", *partials, *shared]


@pytest.mark.parametrize("version", [1, 2])
def test_out_is_written_in_place_and_returned(version: int) -> None:
    step = Step().make()
    out = torch.full((3, 4, 2 * 16), math.nan)[..., ::2]  # strided
    if version == 1:
        returned = paged_attention_v1(out, *step.args(), 0, 0, 0, 64, 0)
    else:
        partials = step.partials(PARTITION)
        returned = paged_attention_v2(out, *partials, *step.args(), 0, 0, 0, 64, 0)
    assert returned is out
    step.assert_exact(out)


def test_out_may_be_the_query() -> None:
    step = Step().make()
    expected = _v1(step)
    mine = step.query.clone()
    assert paged_attention_v1(mine, *step.args(query=mine)) is mine
    assert torch.equal(mine, expected)


def test_alibi_is_zero_for_the_newest_token_and_falls_with_age() -> None:
    step = Step(lengths=(3,), heads=2, kv_heads=1, alibi=True, block_size=2).make()
    step.query.zero_()
    step.slopes = torch.tensor([0.0, math.log(2)])
    v = step.values[0][:, 0]
    out = _v1(step)[0]
    torch.testing.assert_close(out[0], v.mean(0))
    torch.testing.assert_close(out[1], (v[0] + 2 * v[1] + 4 * v[2]) / 7)
    # The least score at most, whatever the slope's sign: no overflow from `slope * position`.
    step.slopes = torch.tensor([-1e4, 1e4])
    out = _v1(step)[0]
    torch.testing.assert_close(out[0], v[0])
    torch.testing.assert_close(out[1], v[2])


@pytest.mark.parametrize("version", [_v1, _v2])
@pytest.mark.parametrize("lengths", [(0,), (0, 0, 0), ()])
@pytest.mark.parametrize("extra_width", [0, 2])
def test_no_context_gives_zeros(version, lengths: tuple, extra_width: int) -> None:
    out = version(Step(lengths=lengths, extra_width=extra_width).make())
    assert out.shape == (len(lengths), 4, 16)
    assert not out.any()


def test_scores_that_overflow_half_precision_are_exact() -> None:
    step = Step(lengths=(20, 7), dtype=torch.float16, spread=150.0, dim=64).make()
    assert step.scores(0)[0].abs().max() / step.scale > torch.finfo(torch.float16).max
    torch.testing.assert_close(_v1(step).double(), step.expected(), rtol=1e-3, atol=1e-3)


class TestPartials:
    @staticmethod
    def _run(step: Step) -> tuple[Tensor, ...]:
        partials = step.partials(PARTITION)
        paged_attention_v2(
            torch.empty_like(step.query), *partials, *step.args(), layout=step.layout
        )
        return partials

    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("size", [7, 16, 1024])
    def test_each_is_the_attention_over_its_partition_alone(self, layout: str, size: int) -> None:
        step = Step(lengths=(1030, 512, 3), block_size=size, layout=layout, alibi=True).make()
        exp_sum, max_logits, tmp_out = self._run(step)
        for row, length in enumerate(step.lengths):
            values = step.values[row].double().repeat_interleave(2, 1)
            for p, start in enumerate(range(0, length, PARTITION)):
                part = slice(start, start + PARTITION)
                scores = step.scores(row)[:, part]
                weights = torch.exp(scores - scores.amax(1, keepdim=True))
                total = weights.sum(1)
                own = torch.einsum("hn,nhd->hd", weights / total.unsqueeze(1), values[part])
                for got, want in (
                    (max_logits[row, :, p], scores.amax(1)),
                    (exp_sum[row, :, p], total),
                    (tmp_out[row, :, p], own),
                ):
                    torch.testing.assert_close(got.double(), want, atol=1e-4, rtol=1e-4)

    def test_a_partition_without_tokens_is_neutral(self) -> None:
        step = Step(lengths=(513, 5, 0), block_size=16, extra_width=70).make()
        exp_sum, max_logits, tmp_out = self._run(step)
        assert exp_sum.shape[-1] == 4
        empty = torch.ones(3, 4, 4, dtype=torch.bool)
        empty[0, :, :2] = empty[1, :, 0] = False
        assert exp_sum[empty].eq(0).all()
        assert exp_sum[~empty].ge(1).all()
        assert max_logits[empty].eq(torch.finfo(torch.float32).min).all()
        assert tmp_out[empty].eq(0).all()
        assert tmp_out[~empty].ne(0).any(-1).all()

    def test_reduced_as_the_known_kernels_do_they_give_the_output(self) -> None:
        step = Step(lengths=(1100, 90), block_size=16).make()
        exp_sum, max_logits, tmp_out = self._run(step)
        share = exp_sum * torch.exp(max_logits - max_logits.amax(-1, keepdim=True))
        out = (tmp_out * (share / share.sum(-1, keepdim=True)).unsqueeze(-1)).sum(2)
        step.assert_exact(out)

    def test_buffers_may_have_more_partitions_than_needed(self) -> None:
        step = Step(lengths=(20,)).make()
        sums = torch.full((1, 4, 5), math.nan)
        tmp = torch.full((1, 4, 5, 16), math.nan)
        out = torch.empty_like(step.query)
        paged_attention_v2(out, sums, sums.clone(), tmp, *step.args(max_seq_len=20))
        step.assert_exact(out)
        assert sums[..., 1:].eq(0).all()
        assert tmp[..., 1:, :].eq(0).all()


QUANTISED = ["fp8", "fp8_e4m3", "fp8_e5m2", "int8"]


@pytest.mark.parametrize("kv_cache_dtype", QUANTISED)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scales", ["floats", "per head"])
def test_quantised_caches_are_exact_for_what_they_hold(kv_cache_dtype, layout, scales):
    k_scale, v_scale = {
        "floats": (0.03, 0.07),
        "per head": (torch.tensor([0.03, 0.05]), torch.tensor([0.07, 0.02])),
    }[scales]
    step = Step(
        lengths=(30, 0, 9),
        layout=layout,
        kv_cache_dtype=kv_cache_dtype,
        k_scale=k_scale,
        v_scale=v_scale,
    ).make()
    for version in (_v1, _v2, _reference):
        assert (version(step).double() - step.expected()).abs().max() < 1e-5


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_e5m2"])
def test_fp8_caches_may_be_declared_as_bytes(kv_cache_dtype: str) -> None:
    step = Step(kv_cache_dtype=kv_cache_dtype, k_scale=0.5, dtype=torch.bfloat16).make()
    expected = _v1(step)
    step.key_cache, step.value_cache = (
        cache.view(torch.uint8) for cache in (step.key_cache, step.value_cache)
    )
    assert torch.equal(_v1(step), expected)
    assert expected.any()


def test_scales_of_an_unquantised_cache_are_not_used() -> None:
    step = Step().make()
    assert torch.equal(_v1(step, k_scale=3.0, v_scale=None), _v1(step))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_results_do_not_depend_on_the_width_of_the_table(dtype: torch.dtype) -> None:
    narrow = Step(lengths=(30, 4, 11), extra_width=0, dtype=dtype).make()
    wide = Step(lengths=(30, 4, 11), extra_width=40, dtype=dtype).make()
    assert torch.equal(_v1(narrow), _v1(wide))


def test_many_rows_of_unlike_length_are_served_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    from compiled_attn.compat.paged import decode

    lengths = (3, 60, 1, 0, 0, 41, 7, 7, 7, 90)
    step = Step(lengths=lengths).make()
    whole = _v1(step)
    monkeypatch.setattr(decode, "_GATHERED_AT_ONCE", 64 * 2 * 16)
    assert len(list(decode._slices(list(lengths), 64))) == 6
    torch.testing.assert_close(_v1(step), whole, atol=1e-6, rtol=1e-6)
    step.assert_exact(_v2(step))


def test_there_is_no_backward() -> None:
    step = Step().make()
    query = step.query.clone().requires_grad_()
    out = torch.empty_like(step.query)
    assert not paged_attention_v1(out, *step.args(query=query)).requires_grad
