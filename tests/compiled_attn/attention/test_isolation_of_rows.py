"""flash and paged attention: what one sequence holds leaves the bits of all others as they are."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_attn.attention.merge import merge
from compiled_attn.compat.flash import flash_attn_with_kvcache, flash_attn_with_kvcache_reference
from compiled_attn.compat.flash.key_slice import KeySlice, attend_fused, attend_plain, attend_sdpa
from compiled_attn.compat.paged import (
    paged_attention_reference,
    paged_attention_v1,
    paged_attention_v2,
)

POISONS = (math.nan, math.inf, -math.inf)
ROWS, QUERIES, HEADS, KV_HEADS, DIM, PAGE = 3, 3, 4, 2, 16, 4
LENGTHS = torch.tensor([9, 5, 13], dtype=torch.int32)  # before the new tokens
TABLE = torch.randperm(18, generator=torch.Generator().manual_seed(0)).view(3, 6).int()
SETTINGS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"causal": True, "window_size": (4, 0)},
    "both sides": {"window_size": (4, 1)},
    "all keys": {},
    "ALiBi": {"causal": True, "alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.05])},
    "softcap": {"causal": True, "softcap": 2.0},
    "splits": {"causal": True, "num_splits": 3},
}


def _flash_inputs(queries: int) -> dict[str, Tensor]:
    gen = torch.Generator().manual_seed(1)
    heads = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}
    inputs = {name: torch.randn(ROWS, queries, n, DIM, generator=gen) for name, n in heads.items()}
    for name in ("k_cache", "v_cache"):
        inputs[name] = torch.randn(18, PAGE, KV_HEADS, DIM, generator=gen)
    return inputs


def _flash_place(name: str, row: int, position: int) -> tuple[int, ...]:
    """An element of the token of a row at a position."""
    if name in ("q", "k", "v"):
        return row, position - int(LENGTHS[row]), -1, 1
    return int(TABLE[row, position // PAGE]), position % PAGE, -1, 1


def _sees(name: str, position: int, own: int, settings: dict[str, Any]) -> bool:
    if name == "q":
        return position == own
    left, right = settings.get("window_size", (-1, -1))
    right = 0 if settings.get("causal") else right
    return (left < 0 or position >= own - left) and (right < 0 or position <= own + right)


def _check_flash(run: Any, queries: int, settings: dict[str, Any]) -> None:
    inputs = _flash_inputs(queries)
    clean, clean_lse = run({k: v.clone() for k, v in inputs.items()})
    for number, (row, name) in enumerate(product(range(ROWS), inputs)):
        length = int(LENGTHS[row])
        positions = range(length, length + queries) if name in "qkv" else (0, length - 1)
        infinity = (math.inf, -math.inf)[number % 2]
        for position, poison in product(positions, (math.nan, infinity)):
            copies = {k: v.clone() for k, v in inputs.items()}
            copies[name][_flash_place(name, row, position)] = poison
            out, lse = run(copies)
            safe = torch.ones(ROWS, queries, dtype=torch.bool)
            safe[row] = torch.tensor(
                [not _sees(name, position, length + i, settings) for i in range(queries)]
            )
            assert torch.equal(out[safe], clean[safe]), (row, name, position, poison)
            lses = (each.transpose(1, 2)[safe] for each in (lse, clean_lse))
            assert torch.equal(*lses), (row, name, position, poison)
            if math.isnan(poison):
                assert out[~safe].isnan().flatten(1).any(1).all(), (row, name, position)


@pytest.mark.parametrize("queries", [1, QUERIES])
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("form", ["portable", "native", "reference"])
def test_flash_keeps_the_rows_of_a_batch_apart(request, form, settings, queries):
    chosen, call = SETTINGS[settings], flash_attn_with_kvcache
    options: dict[str, Any] = {"kernel": form}
    if form == "native":
        request.getfixturevalue("compiler")
        if settings == "both sides":
            pytest.skip("the native kernel has no window to the right")
    if form == "reference":
        call, options = flash_attn_with_kvcache_reference, {}

    def run(inputs: dict[str, Tensor]) -> Any:
        return call(
            **inputs, cache_seqlens=LENGTHS, block_table=TABLE, return_softmax_lse=True,
            **chosen, **options,
        )  # fmt: skip

    _check_flash(run, queries, chosen)


@pytest.mark.slow
@pytest.mark.parametrize("settings", ["causal", "window", "splits"])
@pytest.mark.parametrize("queries", [1, QUERIES, 9])
def test_flash_in_a_graph_of_inductor_too(settings, queries):
    chosen = SETTINGS[settings]

    def call(inputs: dict[str, Tensor]) -> Any:
        return flash_attn_with_kvcache(
            **inputs, cache_seqlens=LENGTHS, block_table=TABLE, return_softmax_lse=True,
            kernel="portable", **chosen,
        )  # fmt: skip

    torch._dynamo.reset()
    _check_flash(torch.compile(call, fullgraph=True, dynamic=False), queries, chosen)
    torch._dynamo.reset()


@pytest.mark.parametrize("form", [attend_plain, attend_fused, attend_sdpa])
@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("which", ["key", "value"])
def test_every_form_of_flash_keeps_later_keys_from_earlier_queries(form, which, poison):
    gen = torch.Generator().manual_seed(2)
    query = torch.randn(2, 3, HEADS, DIM, generator=gen)
    key, value = torch.randn(2, 2, 8, KV_HEADS, DIM, generator=gen)
    seen = (torch.arange(8) <= torch.arange(5, 8).unsqueeze(1)).expand(2, -1, -1)
    clean = merge(form(KeySlice(query, key, value, seen, None, 0.25, 0.0)))
    (key if which == "key" else value)[0, 7, 1, 3] = poison
    out = merge(form(KeySlice(query, key, value, seen, None, 0.25, 0.0)))
    assert torch.equal(out[1], clean[1]) and torch.equal(out[0, :, :2], clean[0, :, :2])
    assert not math.isnan(poison) or out[0, :, 2].isnan().any()


def _paged_inputs() -> dict[str, Tensor]:
    gen = torch.Generator().manual_seed(3)
    inputs = {"query": torch.randn(ROWS, HEADS, DIM, generator=gen)}
    for name in ("key_cache", "value_cache"):
        inputs[name] = torch.randn(18, PAGE, KV_HEADS, DIM, generator=gen)
    return inputs


def _v1(inputs: dict[str, Tensor], kernel: Any = "portable") -> Tensor:
    query, keys, values = inputs.values()
    return paged_attention_v1(
        torch.empty_like(query), query, keys, values, KV_HEADS, 0.25, TABLE, LENGTHS, PAGE, 24,
        None, "auto", 1.0, 1.0, layout="NHD", kernel=kernel,
    )  # fmt: skip


def _v2(inputs: dict[str, Tensor]) -> Tensor:
    query, keys, values = inputs.values()
    sums = torch.empty(2, ROWS, HEADS, 1)
    return paged_attention_v2(
        torch.empty_like(query), *sums, torch.empty(ROWS, HEADS, 1, DIM), query, keys, values,
        KV_HEADS, 0.25, TABLE, LENGTHS, PAGE, 24, None, "auto", 1.0, 1.0, layout="NHD",
    )  # fmt: skip


def _reference(inputs: dict[str, Tensor]) -> Tensor:
    return paged_attention_reference(*inputs.values(), 0.25, TABLE, LENGTHS, PAGE, layout="NHD")


@pytest.mark.parametrize("form", ["v1", "v1 native", "v2", "reference", "graph"])
def test_paged_keeps_sequences_apart(request, form):
    if form == "v1 native":
        request.getfixturevalue("compiler")
    forms = {
        "v1": _v1,
        "v1 native": lambda inputs: _v1(inputs, "native"),
        "v2": _v2,
        "reference": _reference,
        "graph": torch.compile(_v1, backend="aot_eager", fullgraph=True),
    }
    inputs = _paged_inputs()
    clean = forms[form]({k: v.clone() for k, v in inputs.items()})
    for row, name, poison in product(range(ROWS), inputs, POISONS):
        copies = {k: v.clone() for k, v in inputs.items()}
        position = int(LENGTHS[row]) - 1
        at = TABLE[row, position // PAGE], position % PAGE
        copies[name][(row, -1, 1) if name == "query" else (*at, -1, 1)] = poison
        out = forms[form](copies)
        others = torch.arange(ROWS) != row
        assert torch.equal(out[others], clean[others]), (row, name, poison)
        assert not math.isnan(poison) or out[row].isnan().any(), (row, name)
