"""`PagedAttention`: buckets, steps that write and then attend, and what it refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compiled_attn.compat.paged import (
    LAYOUTS,
    PagedArgumentError,
    PagedAttention,
    PagedInputs,
    empty_caches,
)
from tests.compiled_attn.compat.paged.scene import Step


def _module(step: Step, **options: Any) -> PagedAttention:
    return PagedAttention(
        step.key_cache,
        step.value_cache,
        step.kv_heads,
        step.block_size,
        step.scale,
        layout=step.layout,  # type: ignore[arg-type]
        alibi_slopes=step.slopes,
        kv_cache_dtype=step.kv_cache_dtype,
        k_scale=step.k_scale,
        v_scale=step.v_scale,
        **options,
    )


def _padded(step: Step, rows: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """query, block_tables and seq_lens of a bucket, padded with poison, junk and 0."""
    count, used = step.block_tables.shape
    query = torch.full((rows, step.heads, step.dim), step.poison, dtype=step.dtype)
    tables = torch.full((rows, width), -1, dtype=step.index_dtype)
    lengths = torch.zeros(rows, dtype=step.index_dtype)
    query[:count], tables[:count, :used], lengths[:count] = (
        step.query,
        step.block_tables,
        step.seq_lens,
    )
    return query, tables, lengths


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32),
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=4).map(tuple),
    layout=st.sampled_from(LAYOUTS),
    kv_cache_dtype=st.sampled_from(["auto", "auto", "int8", "fp8"]),
    alibi=st.booleans(),
    partition=st.sampled_from([None, 1, 5, 8, 512]),
    more_rows=st.integers(0, 3),
    more_width=st.integers(0, 3),
)
def test_a_step_is_exact_in_every_bucket(
    seed: int,
    lengths: tuple[int, ...],
    layout: str,
    kv_cache_dtype: str,
    alibi: bool,
    partition: int | None,
    more_rows: int,
    more_width: int,
) -> None:
    step = Step(
        seed, lengths, layout=layout, kv_cache_dtype=kv_cache_dtype, alibi=alibi, k_scale=0.05
    )
    step.v_scale = torch.tensor([0.04, 0.02])
    step.make()
    rows, width = len(lengths) + more_rows, step.block_tables.shape[1] + more_width
    out = _module(step, partition=partition)(*_padded(step, rows, width))
    step.assert_exact(out[: len(lengths)])
    assert not out[len(lengths) :].any()


def _growing(layout: str) -> tuple[PagedAttention, Tensor, Tensor]:
    key_cache, value_cache = empty_caches(9, 4, 2, 8, layout=layout)  # type: ignore[arg-type]
    key_cache.fill_(math.nan), value_cache.fill_(math.nan)
    module = PagedAttention(key_cache, value_cache, 2, 4, 8**-0.5, layout=layout)  # type: ignore[arg-type]
    return module, key_cache, value_cache


@pytest.mark.parametrize("layout", LAYOUTS)
def test_token_by_token_it_equals_attention_over_all_tokens(layout: str) -> None:
    module, key_cache, _ = _growing(layout)
    assert module.key_cache is key_cache
    tables = torch.tensor([[7, 2, 5], [8, 1, 3], [-1, -1, -1]], dtype=torch.int32)
    keys, values = torch.randn(2, 3, 11, 2, 8)
    for t in range(11):
        starts = [t, t + 1 if t < 9 else 0, 0]  # the second sequence is done after 9 tokens
        seq_lens = torch.tensor([t + 1, starts[1], 0], dtype=torch.int32)
        slots = [int(tables[s, t // 4]) * 4 + t % 4 if seq_lens[s] else -1 for s in range(3)]
        query, mapping = torch.randn(3, 4, 8), torch.tensor(slots)
        out = module(query, tables, seq_lens, keys[:, t], values[:, t], mapping)
        for s in range(3):
            n = int(seq_lens[s])
            k, v = (x[s, :n].repeat_interleave(2, 1) for x in (keys, values))
            scores = torch.einsum("hd,nhd->hn", query[s], k) * 8**-0.5
            expected = torch.einsum("hn,nhd->hd", scores.softmax(-1), v)
            torch.testing.assert_close(out[s], expected, atol=1e-6, rtol=1e-5)


def test_padded_inputs_give_the_same_rows_then_zeros_and_write_nothing_more() -> None:
    module, key_cache, value_cache = _growing("packed")
    step = PagedInputs(
        torch.randn(2, 4, 8),
        torch.tensor([[3], [4]], dtype=torch.int32),
        torch.tensor([1, 1], dtype=torch.int32),
        *torch.randn(2, 2, 2, 8),
        torch.tensor([12, 16]),
    )
    expected = module(*step)
    after = key_cache.clone(), value_cache.clone()
    key_cache.fill_(math.nan), value_cache.fill_(math.nan)
    bucket = step.padded(5, 3)
    assert [list(each.shape) for each in bucket if each is not None] == [
        *([5, 4, 8], [5, 3], [5], [5, 2, 8], [5, 2, 8], [5])
    ]
    assert bucket.slot_mapping is not None
    assert bucket.slot_mapping.tolist() == [12, 16, -1, -1, -1]
    out = module(*bucket)
    assert torch.equal(out[:2], expected)
    assert not out[2:].any()
    for cache, right in zip((key_cache, value_cache), after, strict=True):
        assert torch.equal(cache.nan_to_num(7.0), right.nan_to_num(7.0))


def test_inputs_without_a_write_are_padded_too() -> None:
    query, tables, lengths = torch.zeros(1, 4, 8), torch.zeros(1, 1).long(), torch.ones(1).long()
    step = PagedInputs(query, tables, lengths)
    assert step.padded(2, 1)[3:] == (None, None, None)
    for bucket in ((0, 1), (1, 0)):
        with pytest.raises(PagedArgumentError, match="at least 1 rows and 1 columns, got"):
            step.padded(*bucket)


def test_caches_are_buffers_that_no_checkpoint_holds() -> None:
    scales = {"k_scale": torch.tensor([0.5, 0.5]), "v_scale": torch.tensor(0.5)}
    module = _module(Step(kv_cache_dtype="int8", alibi=True, **scales).make())
    names = {name for name, _ in module.named_buffers()}
    assert names == {"key_cache", "value_cache", "alibi_slopes", "k_scale", "v_scale"}
    assert module.state_dict() == {}
    assert module.to("meta").k_scale.is_meta


def test_it_says_what_it_is() -> None:
    text = repr(_module(Step().make()))
    assert "kv_heads=2, block_size=4, layout=packed, kv_cache_dtype=auto" in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slot_mapping": None}, r"together, or none of them, got \[True, True, False\]"),
        ({"key": None}, r"together, or none of them, got \[False, True, True\]"),
        ({"slot_mapping": torch.tensor([1, 2])}, r"slot_mapping \(S,\) of shape \[3\], got \[2\]"),
        ({"key": torch.zeros(2, 2, 8)}, r"key \(S, Hk, D\) of shape \[3, 2, 8\]"),
        ({"key": torch.zeros(3, 2, 8).half()}, "key of dtype float32, got float16"),
        ({"value": torch.zeros(3, 1, 8)}, "value like key"),
        ({"slot_mapping": torch.tensor([1, 2, 99])}, "slots below 36"),
        ({"seq_lens": torch.tensor([1, 9, 0])}, r"seq_lens\[1\] in 0 .. 8"),
        ({"block_tables": torch.tensor([[1, 2], [9, 3], [4, 4]])}, r"block_tables\[1, 0\]"),
        ({"block_tables": torch.zeros(2, 2).int()}, r"block_tables .*\[3, any\]"),
    ],
)
def test_what_does_not_fit_is_refused_and_the_caches_are_as_they_were(change, message):
    module, key_cache, value_cache = _growing("packed")
    arguments = {
        "query": torch.zeros(3, 4, 8),
        "block_tables": torch.tensor([[1, 2], [3, 3], [4, 4]]),
        "seq_lens": torch.tensor([1, 1, 0]),
        "key": torch.zeros(3, 2, 8),
        "value": torch.zeros(3, 2, 8),
        "slot_mapping": torch.tensor([4, 12, -1]),
    }
    with pytest.raises(PagedArgumentError, match=message):
        module(**(arguments | change))
    assert key_cache.isnan().all()
    assert value_cache.isnan().all()
    module(**arguments)
    assert not key_cache.isnan().all()


def test_a_partition_without_tokens_is_refused() -> None:
    with pytest.raises(PagedArgumentError, match="partition of at least 1 token, or None, got 0"):
        _module(Step().make(), partition=0)
