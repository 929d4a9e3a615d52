"""Metadata that unified attention refuses: of another bucket, incomplete, or out of range."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled_attn import unified_attention
from tests.compiled_attn.attention.unified_call import Call, cases, of_another_size, put

METADATA = {
    "slots of another bucket": ({"slot_mapping": of_another_size}, "slot_mapping .* same bucket"),
    "causal bias of another bucket": ({"causal_bias": lambda x: x[:, 1:]}, "expected causal_bias "),
    "causal bias of KV heads": ({"causal_bias": lambda x: x.expand(2, -1, -1)}, "causal_bias "),
    "shared bias of another bucket": ({"shared_bias": lambda x: x[:, 1:]}, "expected shared_bias "),
    "shared bias of other blocks": ({"shared_bias": lambda x: x[..., 1:]}, "expected shared_bias "),
    "usages of another bucket": (
        {"shared_bias": torch.zeros(12, 3, dtype=torch.int64)},
        r"expected shared_bias \(usages\) of",
    ),
    "lengths of another bucket": ({"shared_lengths": of_another_size}, "expected shared_lengths "),
    "a scalar of blocks": ({"shared_blocks": torch.tensor(3)}, "expected shared_b.* of shape"),
    "blocks in rows": ({"unique_blocks": lambda x: x.unsqueeze(0)}, "expected unique_blocks "),
    "mapping of other bucket": ({"unique_block_mapping": of_another_size}, "unique_block_mapping "),
    "unique bias of another bucket": ({"unique_bias": of_another_size}, "expected unique_bias "),
    "unique bias of other blocks": ({"unique_bias": lambda x: x[:, 1:]}, "expected unique_bias "),
    "unique queries in rows": ({"unique_queries": lambda x: x.unsqueeze(0)}, "unique_queries "),
    "shared blocks without bias": ({"shared_bias": None}, "all fields of the shared part"),
    "unique blocks without bias": ({"unique_bias": None}, "all fields of the unique part"),
    "a bias without blocks": ({"unique_blocks": None}, "all fields of the unique part"),
    "no part at all": (
        {
            "causal_bias": None,
            "shared_blocks": None,
            "shared_bias": None,
            "unique_blocks": None,
            "unique_block_mapping": None,
            "unique_bias": None,
        },
        "at least one part",
    ),
    "parts that are all empty": (
        {
            "causal_bias": None,
            "shared_blocks": lambda x: x[:0],
            "shared_bias": lambda x: x[:, :0],
            "unique_blocks": 0,
            "unique_block_mapping": lambda x: x[:0],
            "unique_bias": lambda x: x[:0],
        },
        "at least one part",
    ),
    "some fields of requests": (
        {"seq_lens": torch.zeros(2, dtype=torch.int32)},
        "expected block_tables, seq_lens and query_start_loc together",
    ),
    "a chunk of no block": ({"shared_chunk": 0}, "expected shared_chunk of at least 1"),
    "a slice of no query": ({"causal_width": 0}, "expected causal_width of at least 1"),
    "window without positions": ({"sliding_window": 3, "positions": None}, r"metadata\.positions"),
    "slopes alone": ({"alibi_slopes": torch.ones(4), "positions": None}, r"a\.positions: expected"),
    "a window without starts of shared blocks": (
        {"sliding_window": 3, "shared_starts": None},
        r"metadata\.shared_starts: expected",
    ),
    "slopes without starts of unique blocks": (
        {"alibi_slopes": torch.ones(4), "unique_starts": None},
        r"metadata\.unique_starts: expected",
    ),
    "other positions": ({"sliding_window": 3, "positions": of_another_size}, "positions of shape"),
    "no window": ({"sliding_window": 0}, "sliding_window: expected at least 1 token, got 0"),
    "a negative window": ({"sliding_window": -1}, "expected at least 1 token, got -1"),
    "a cap of nothing": ({"softcap": 0.0}, "expected softcap of a positive number"),
}

NUMBERS = {
    "a slot beyond the cache": ({"slot_mapping": put(0, 64 * 4)}, r"slot_mapping: .* 0\.\.255"),
    "a negative slot": ({"slot_mapping": put(0, -1)}, r"slot_mapping: expected .* got -1"),
    "a slot twice": ({"slot_mapping": lambda x: put(0, int(x[1]))(x)}, r"slot \d+ twice: .* copy"),
    "shared block beyond the cache": ({"shared_blocks": put(0, 64)}, r"shared_blocks: .* 0\.\.63"),
    "a negative shared block": ({"shared_blocks": put(1, -64)}, "shared_blocks: .* got -64"),
    "unique block beyond the cache": ({"unique_blocks": put(0, 64)}, r"unique_blocks: .* 0\.\.63"),
    "a negative unique block": ({"unique_blocks": put(2, -1)}, "unique_blocks: .* got -1"),
    "row beyond the step": ({"unique_block_mapping": put(0, 12)}, r"block_mapping: .* 0\.\.11"),
    "a negative row": ({"unique_block_mapping": put(0, -1)}, "unique_block_mapping: expected"),
    "more blocks than the cache has": (
        {
            "unique_blocks": 65,
            "unique_block_mapping": torch.zeros(65, dtype=torch.int64),
            "unique_bias": torch.zeros(65, 4),
        },
        "expected unique_blocks of at most 64, got 65",
    ),
    "a row without a query": ({"unique_queries": put(1, -1)}, "unique_queries: expected .* once"),
    "a query that is listed twice": (
        {"unique_queries": lambda x: put(-1, int(x[0]))(x)},
        "unique_queries: expected every row .* once",
    ),
}


@pytest.mark.parametrize(("changes", "error", "match"), cases(ValueError, METADATA, NUMBERS))
def test_bad_metadata_is_refused_with_a_remedy_and_nothing_is_written(changes, error, match):
    call = Call()
    call.change(changes)
    call.refuses(error, match)


@given(at=st.integers(0, 8), other=st.integers(0, 8), int32=st.booleans())
@settings(max_examples=20)
def test_any_two_tokens_with_one_slot_are_refused(at, other, int32):
    call = Call()
    slots = call.arguments["metadata"].slot_mapping
    twice = put(at, int(slots[other]))(slots).to(torch.int32 if int32 else torch.int64)
    call.change({"slot_mapping": twice})
    if at == other:
        unified_attention(**call.arguments)
    else:
        call.refuses(ValueError, "slot of its own")


def test_padding_may_write_one_slot_of_the_null_block_many_times():
    call = Call()
    tokens = len(call.arguments["metadata"].slot_mapping)
    call.change({"slot_mapping": torch.zeros(tokens, dtype=torch.int64)})
    unified_attention(**call.arguments)


def test_a_scene_that_is_refused_can_be_run_when_it_is_mended():
    call = Call(cache_dtype=None)
    mended = call.arguments["metadata"]
    call.change({"unique_blocks": put(0, -1)})
    call.refuses(ValueError, "unique_blocks")
    out = unified_attention(**call.arguments | {"metadata": mended})
    expected, _ = call.scene.expected()
    torch.testing.assert_close(out[:9].double(), expected, atol=2e-6, rtol=2e-6)
