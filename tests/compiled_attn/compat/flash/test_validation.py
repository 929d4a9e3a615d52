from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from compiled_attn.compat.flash import (
    FlashArgumentError,
    flash_attn_with_kvcache,
    flash_attn_with_kvcache_reference,
)
from tests.compiled_attn.compat.flash.cases import Case

Change = Callable[[Case], dict[str, Any]]
ALL = slice(None)


def contiguous(**sizes: Any) -> Case:
    common = {"batch": 2, "queries": 2, "new": 2, "dim": 32, "rotary": 16, "capacity": 16}
    return Case(**common, lengths=[3, 7], **sizes).make()


def paged() -> Case:
    return contiguous(page_size=4)


def ints(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def cut(name: str, *index: Any) -> Change:
    return lambda case: {name: case.args[name][index]}


def caches(*index: slice) -> Change:
    return lambda case: {name: case.args[name][index] for name in ("k_cache", "v_cache")}


def cast(name: str, dtype: torch.dtype) -> Change:
    return lambda case: {name: case.args[name].to(dtype)}


def give(**values: Any) -> Change:
    return lambda case: values


def tables(*shape: int) -> dict[str, Any]:
    return {name: torch.ones(shape) for name in ("rotary_cos", "rotary_sin")}


def strided(case: Case) -> dict[str, Any]:
    cache = case.k_cache.transpose(2, 3).contiguous().transpose(2, 3)
    return {"k_cache": cache}


ANY: dict[str, tuple[Change, str]] = {
    "q of rank 3": (cut("q", 0), r"q \[B, Sq, H, D\].*got \[2, 4, 32\]"),
    "q of an int dtype": (cast("q", torch.int32), "q of dtype float32 or .*got int32"),
    "an empty batch": (cut("q", slice(0)), "at least one row"),
    "k_cache of another dtype": (cast("k_cache", torch.float16), "k_cache of dtype float32"),
    "v_cache of another dtype": (cast("v_cache", torch.bfloat16), "v_cache of dtype float32"),
    "k of another dtype": (cast("k", torch.float64), "k of dtype float32, got float64"),
    "v of another dtype": (cast("v", torch.float64), "v of dtype float32, got float64"),
    "cos of another dtype": (cast("rotary_cos", torch.float16), "rotary_cos of dtype float32"),
    "sin of another dtype": (cast("rotary_sin", torch.float16), "rotary_sin of dtype float32"),
    "k_cache of rank 3": (cut("k_cache", 0), r"k_cache \["),
    "caches of two shapes": (cut("v_cache", ALL, slice(0, 2)), "v_cache .* of shape"),
    "cache of another head dim": (cut("k_cache", ..., slice(0, 16)), r"any, any, any, 32\]"),
    "odd heads": (cut("q", ALL, ALL, slice(0, 3)), r"H divisible by Hk, got \(3, 2\)"),
    "a cache with a strided head dim": (strided, r"stride\(-1\) == 1"),
    "k without v": (give(v=None), r"k and v, or neither, got only \['k'\]"),
    "v without k": (give(k=None), r"k and v, or neither, got only \['v'\]"),
    "k of another batch": (cut("k", slice(0, 1)), r"k \[B, Sn, Hk, D\] of shape \[2, any, 2, 32\]"),
    "v shorter than k": (cut("v", ALL, slice(0, 1)), r"v .* of shape \[2, 2, 2, 32\]"),
    "k of query heads": (lambda c: {"k": c.args["q"]}, r"k .* of shape \[2, any, 2, 32\]"),
    "no lengths with k": (give(cache_seqlens=None), "cache_seqlens with k"),
    "too many queries": (lambda c: {"q": c.args["q"].repeat(1, 9, 1, 1)}, r"Sq of .*\(18, 16\)"),
    "too many tokens": (lambda c: {n: c.args[n].repeat(1, 9, 1, 1) for n in "kv"}, r"lens \+ Sn"),
    "float lengths": (cast("cache_seqlens", torch.float32), "seqlens of dtype int32 or int64"),
    "lengths of int16": (cast("cache_seqlens", torch.int16), "cache_seqlens of dtype int32"),
    "other lengths": (give(cache_seqlens=ints(1, 2, 3)), r"cache_seqlens \[B\] of shape \[2\]"),
    "strided lengths": (give(cache_seqlens=ints(1, 2, 3, 4)[::2]), "contiguous cache_seqlens"),
    "negative lengths": (give(cache_seqlens=ints(-1, 2)), "cache_seqlens of at least 0, got -1"),
    "a negative length": (give(cache_seqlens=-1), "cache_seqlens of at least 0, got -1"),
    "a length without room": (give(cache_seqlens=15), r"cache_seqlens \+ Sn .* got 15 \+ 2"),
    "lengths without room": (give(cache_seqlens=ints(0, 15)), r"lens \+ Sn of .* got 15 \+ 2"),
    "left pad of another batch": (give(cache_leftpad=ints(1)), "cache_leftpad"),
    "left pad of a float dtype": (give(cache_leftpad=torch.zeros(2)), "cache_leftpad of dtype"),
    "strided left pad": (give(cache_leftpad=ints(1, 2, 3, 4)[::2]), "contiguous cache_leftpad"),
    "negative left pad": (give(cache_leftpad=ints(0, -1)), "cache_leftpad within the row"),
    "left pad beyond the row": (give(cache_leftpad=ints(0, 10)), "cache_leftpad within the row"),
    "rows of another batch": (give(cache_batch_idx=ints(0)), "cache_batch_idx"),
    "rows of a float dtype": (give(cache_batch_idx=torch.zeros(2)), "cache_batch_idx of dtype"),
    "strided rows": (give(cache_batch_idx=ints(0, 1, 1, 0)[::2]), "contiguous cache_batch_idx"),
    "row that is not there": (give(cache_batch_idx=ints(0, 2)), r"in 0 .. 1, got \[0, 2\]"),
    "negative row": (give(cache_batch_idx=ints(0, -1)), r"in 0 .. 1, got \[0, -1\]"),
    "cos without sin": (give(rotary_sin=None), "rotary_cos and rotary_sin"),
    "sin without cos": (give(rotary_cos=None), "rotary_cos and rotary_sin"),
    "rotary without k": (give(k=None, v=None), "k and v with rotary_cos"),
    "cos and sin of two shapes": (cut("rotary_sin", slice(0, 16)), "rotary_sin .* of shape"),
    "a rotary dim beyond the head": (give(**tables(20, 24)), r"at most D, got \(48, 32\)"),
    "a rotary dim not divisible by 16": (give(**tables(20, 4)), "divisible by 16, got 8"),
    "short rotary tables": (give(**tables(15, 8)), r"every cache slot, got \(15, 16\)"),
    "strided rotary tables": (
        lambda c: {n: t.repeat(1, 2)[:, :8] for n, t in tables(20, 8).items()},
        "contiguous rotary",
    ),
    "half slopes": (give(alibi_slopes=torch.ones(4).half()), "alibi_slopes of dtype float32"),
    "slopes of key heads": (give(alibi_slopes=torch.ones(2)), r"alibi_slopes .* of shape \[4\]"),
    "slopes of another batch": (give(alibi_slopes=torch.ones(3, 4)), r"alibi_slopes .* \[2, 4\]"),
    "too many splits": (give(num_splits=129), "num_splits of 0 to 128, got 129"),
    "negative splits": (give(num_splits=-1), "num_splits of 0 to 128, got -1"),
    "a window of one side": (give(window_size=(3,)), "window_size"),
    "a window of floats": (give(window_size=(1.5, 0)), "window_size"),
}
CONTIGUOUS: dict[str, tuple[Change, str]] = {
    "fewer cache rows than batch rows": (caches(slice(1)), "a row of k_cache"),
    "expanded cache": (lambda c: {"v_cache": c.v_cache[:1].expand(2, -1, -1, -1)}, "expanded"),
    "a cache without slots": (caches(ALL, slice(0)), "a cache with room"),
}
PAGED: dict[str, tuple[Change, str]] = {
    "a table of rank 1": (cut("block_table", 0), r"block_table \[B, W\]"),
    "a table of a float dtype": (cast("block_table", torch.float32), "block_table of dtype"),
    "a table of another batch": (cut("block_table", slice(0, 1)), "a row of block_table"),
    "a strided table": (
        lambda c: {"block_table": c.table.T.contiguous().T},  # type: ignore[union-attr]
        r"block_table of stride\(-1\)",
    ),
    "a cache without pages": (caches(slice(0)), "a cache with room"),
    "a table without columns": (cut("block_table", ALL, slice(0)), "a cache with room"),
    "an overflow names block_table": (give(cache_seqlens=ints(0, 15)), "block_table"),
    "an int overflow names block_table": (give(cache_seqlens=15), "block_table"),
}


def refused(case: Case, changes: dict[str, Any], match: str, error: type[Exception]) -> None:
    for function in (flash_attn_with_kvcache, flash_attn_with_kvcache_reference):
        before = case.bits()
        with pytest.raises(error, match=match) as caught:
            case.run(function, **changes)
        assert torch.equal(case.bits(), before)
        if error is FlashArgumentError:
            assert isinstance(caught.value, RuntimeError) and isinstance(caught.value, ValueError)
            assert ": " in str(caught.value)


@pytest.mark.parametrize(
    ("make", "changes"),
    [
        *(pytest.param(contiguous, each, id=name) for name, each in (ANY | CONTIGUOUS).items()),
        *(pytest.param(paged, each, id=f"{name}, paged") for name, each in (ANY | PAGED).items()),
    ],
)
def test_a_bad_call_is_refused_and_writes_nothing(make, changes):
    change, match = changes
    case = make()
    refused(case, change(case), match, FlashArgumentError)


TENSORS = "q", "k_cache", "v_cache", "k", "v", "rotary_cos", "cache_seqlens", "alibi_slopes"


@pytest.mark.parametrize("name", [*TENSORS, "block_table"])
def test_what_is_no_tensor_is_a_type_error(name: str) -> None:
    refused(paged(), {name: [1, 2]}, f"{name}: expected a tensor .* got list", TypeError)


@pytest.mark.parametrize("name", ["softmax_scale", "softcap"])
@pytest.mark.parametrize("value", ["2", torch.tensor(2.0)])
def test_what_is_no_number_is_a_type_error(name: str, value: Any) -> None:
    got = type(value).__name__
    refused(paged(), {name: value}, f"{name}: expected a number, got {got}", TypeError)


def test_a_missing_cap_a_bool_length_and_a_large_head_are_refused() -> None:
    message = "softcap: expected a number, got NoneType: 0.0 is no softcap"
    refused(paged(), {"softcap": None}, message, TypeError)
    refused(contiguous(), {"cache_seqlens": True}, "cache_seqlens: expected a tensor", TypeError)
    refused(Case(dim=257).make(), {}, "a head dim of 1 to 256, got 257", FlashArgumentError)


def test_another_device_is_refused() -> None:
    case = paged()
    for name in ("k_cache", "k", "rotary_sin", "cache_seqlens", "block_table"):
        there = {name: case.args[name].to("meta")}
        refused(case, there, f"{name} on cpu, got meta", FlashArgumentError)


@pytest.mark.parametrize("page", [-1, 10**6])
def test_a_used_page_that_does_not_exist_is_refused(page: int) -> None:
    case = paged()
    assert case.table is not None
    for column in range(3):  # row 1 has 7 + 2 tokens: columns 0 to 2
        table = case.table.clone()
        table[1, column] = page
        message = rf"block_table\[1, {column}\] in 0 .. {case.pages - 1}, got {page}"
        refused(case, {"block_table": table}, message, FlashArgumentError)
    table[1] = case.table[1]
    table[1, 3] = page
    case.run(flash_attn_with_kvcache, block_table=table)


def test_a_page_before_the_left_pad_need_not_exist() -> None:
    case = paged()
    assert case.table is not None
    table = case.table.clone()
    table[1, 0] = -1
    pads = ints(0, 4)
    out = case.run(flash_attn_with_kvcache, cache_leftpad=pads)[0]
    again = case.run(flash_attn_with_kvcache, block_table=table, cache_leftpad=pads)[0]
    assert torch.equal(out, again)
    refused(
        case, {"block_table": table, "cache_leftpad": ints(0, 3)}, "block_table", FlashArgumentError
    )


def test_two_tokens_for_one_slot_are_refused() -> None:
    case = Case(batch=2, new=2, page_size=4, lengths=[4, 5]).make()
    assert case.table is not None
    table = case.table.clone()
    table[1, 1] = table[0, 1] = 3
    refused(case, {"block_table": table}, "page 3 slot 1 twice", FlashArgumentError)
    table[1, 1] = table[0, 1] = 0  # the null page: padding writes there
    case.run(flash_attn_with_kvcache, block_table=table)


def test_a_query_without_a_rotary_row_is_refused() -> None:
    case = Case(queries=6, new=1, dim=16, rotary=16, capacity=8, lengths=[6, 7], causal=True).make()
    refused(case, {}, r"a rotary row for every query, got \(13, 10\)", FlashArgumentError)
    case.run(flash_attn_with_kvcache, causal=False)  # then every query turns as token L
