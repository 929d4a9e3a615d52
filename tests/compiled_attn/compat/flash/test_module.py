from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from compiled_attn.compat.flash import (
    FlashArgumentError,
    FlashInputs,
    FlashKVCacheAttention,
    flash_attn_with_kvcache,
)
from graphs.capture.capture import capture
from tests.compiled_attn.compat.flash.cases import Case

OPTIONS = ("rotary_cos", "rotary_sin", "softcap", "window_size", "causal", "alibi_slopes")


def paddable(**sizes: Any) -> Case:
    """A paged or contiguous case that leaves page 0 or row 0 to the padding."""
    for seed in range(100):
        case = Case(seed=seed, batch=3, causal=True, **sizes).make()
        table = case.table
        free = 0 not in (case.rows if table is None else table[case.rows].flatten().tolist())
        if free:
            return case
    raise AssertionError("no case without page 0")


def module_of(case: Case) -> FlashKVCacheAttention:
    options = {name: case.args[name] for name in OPTIONS if name in case.args}
    return FlashKVCacheAttention(case.k_cache, case.v_cache, return_softmax_lse=True, **options)


def inputs_of(case: Case) -> FlashInputs:
    names = ("q", "k", "v", "cache_seqlens", "block_table", "cache_batch_idx", "cache_leftpad")
    return FlashInputs(*(case.args.get(name) for name in names))  # type: ignore[arg-type]


def paged(**sizes: Any) -> Case:
    return paddable(page_size=4, queries=2, new=2, dim=32, rotary=16, rotary_rows=256, **sizes)


def contiguous(**sizes: Any) -> Case:
    return paddable(batch_idx=True, queries=2, new=2, dim=32, rotary=16, rotary_rows=256, **sizes)


@pytest.mark.parametrize("make", [paged, contiguous])
def test_a_padded_bucket_gives_the_same_rows_and_the_same_cache(make: Any) -> None:
    case = make()
    want, want_lse = case.run(flash_attn_with_kvcache)
    written = case.bits()
    case = make()
    out, lse = module_of(case)(*inputs_of(case).padded(8, 11 if case.page_size else None))
    assert torch.allclose(out[:3], want, atol=1e-6) and torch.allclose(lse[:3], want_lse, atol=1e-6)
    assert bool((out[3:] == 0).all()) and bool((lse[3:] == -math.inf).all())
    size = case.k_cache[0].numel()
    for got, right in zip(case.bits().chunk(2), written.chunk(2), strict=True):
        assert torch.equal(got[size:], right[size:])  # all but the null page
        assert not torch.equal(got[:size], right[:size])


@pytest.mark.parametrize("make", [paged, contiguous])
def test_poison_in_padded_rows_stays_there(make: Any) -> None:
    case = make(leftpad=True)
    want = case.run(flash_attn_with_kvcache)[0]
    case = make(leftpad=True)
    inputs = inputs_of(case).padded(5)
    for tensor in (inputs.q, inputs.k, inputs.v):
        assert tensor is not None
        tensor[3:] = math.nan
    out, lse = module_of(case)(*inputs)
    assert torch.allclose(out[:3], want, atol=1e-6)
    assert bool((out[3:] == 0).all()) and bool((lse[3:] == -math.inf).all())


def test_new_tokens_of_padded_rows_stay_in_page_0_however_many_they_are() -> None:
    case = paddable(page_size=4, queries=1, new=11)
    before = case.k_cache.clone()
    all_padding = inputs_of(case)._replace(
        cache_seqlens=torch.zeros(3, dtype=torch.int32),
        block_table=torch.zeros_like(case.args["block_table"]),
    )
    out, _ = module_of(case)(*all_padding)
    assert bool((out == 0).all())
    assert torch.equal(case.k_cache[1:].view(torch.int32), before[1:].view(torch.int32))


def test_results_do_not_depend_on_the_bucket() -> None:
    small = paged()
    out, lse = module_of(small)(*inputs_of(small).padded(4, 6))
    for batch, columns in ((4, 16), (8, 6), (16, 64)):
        case = paged()
        again, again_lse = module_of(case)(*inputs_of(case).padded(batch, columns))
        assert torch.allclose(again[:4], out, atol=1e-6, rtol=1e-6)
        assert torch.allclose(again_lse[:4], lse, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_it_is_captured_once_per_bucket(backend: str) -> None:
    case = paged()
    want = case.run(flash_attn_with_kvcache)[0]
    written = case.bits()
    case = paged()
    module = module_of(case)
    bucket = inputs_of(case).padded(4, 8)
    nothing = FlashInputs(*(None if each is None else torch.zeros_like(each) for each in bucket))  # type: ignore[arg-type]
    with torch.no_grad():
        graph = capture(module, nothing, backend=backend)
        out, _ = graph.run(*bucket)
    assert torch.allclose(out[:3], want, atol=1e-6)
    size = case.k_cache[0].numel()
    assert torch.equal(case.bits().chunk(2)[1][size:], written.chunk(2)[1][size:])


def test_without_new_tokens_it_only_reads() -> None:
    case = paddable(page_size=4, queries=2)
    before = case.bits()
    want = case.run(flash_attn_with_kvcache)[0]
    module = FlashKVCacheAttention(
        case.k_cache, case.v_cache, rotary_cos=torch.ones(64, 8), rotary_sin=torch.ones(64, 8)
    )
    out = module(*inputs_of(case))
    assert torch.allclose(out, want, atol=1e-6)
    assert torch.equal(case.bits(), before)


def test_the_cache_is_a_buffer_that_no_checkpoint_holds() -> None:
    module = module_of(paged())
    assert {"k_cache", "v_cache", "rotary_cos", "rotary_sin"} <= dict(module.named_buffers()).keys()
    assert not module.state_dict()
    assert "dtype=torch.float32, causal=True" in repr(module)


def test_a_small_bucket_and_a_contiguous_cache_without_rows_are_refused() -> None:
    inputs = inputs_of(paged())
    with pytest.raises(ValueError, match="at least 3 rows and 6 columns, got 2 and 6"):
        inputs.padded(2)
    with pytest.raises(ValueError, match="at least 3 rows and 6 columns, got 4 and 5"):
        inputs.padded(4, 5)
    plain = inputs_of(Case(batch=3, new=1).make())
    assert plain.padded(3).block_table is None
    with pytest.raises(ValueError, match="expected cache_batch_idx"):
        plain.padded(4)


def test_metadata_of_another_bucket_is_refused_and_writes_nothing() -> None:
    case = paged()
    before = case.bits()
    with pytest.raises(FlashArgumentError, match="cache_seqlens"):
        module_of(case)(*inputs_of(case).padded(4)._replace(cache_seqlens=torch.zeros(3).int()))
    assert torch.equal(case.bits(), before)


def test_padding_of_rows_that_an_index_picks_from_a_table_stays_in_page_0() -> None:
    case = paged(batch_idx=True)
    assert case.args["block_table"].shape[0] > 3
    want = case.run(flash_attn_with_kvcache)[0]
    written = case.bits()
    case = paged(batch_idx=True)
    inputs = inputs_of(case)
    assert inputs.block_table is not None and inputs.cache_batch_idx is not None
    padded = inputs.padded(8, 11)
    assert padded.cache_batch_idx is None
    assert padded.block_table is not None and padded.block_table.shape == (8, 11)
    out, _ = module_of(case)(*padded)
    assert torch.allclose(out[:3], want, atol=1e-6) and bool((out[3:] == 0).all())
    size = case.k_cache[0].numel()
    for got, right in zip(case.bits().chunk(2), written.chunk(2), strict=True):
        assert torch.equal(got[size:], right[size:])
    for wrong in (-1, len(inputs.block_table)):
        rows = torch.tensor([0, wrong, 1])
        with pytest.raises(ValueError, match=f"cache_batch_idx in 0 .. .* got .0, {wrong}, 1"):
            inputs._replace(cache_batch_idx=rows).padded(8, 11)
