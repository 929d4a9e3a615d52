"""Step metadata: recorded golden values, padding, and one step for several interfaces."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from compiled_attn import FlashKVCacheAttention, PagedAttention, unified_attention
from compiled_attn.compat import paged
from compiled_attn.step import AttentionMetadata, BatchBuilder, Request, RequestTable


def _metadata(requests: list[Request], block_size: int = 16, **options) -> AttentionMetadata:
    plan = BatchBuilder(200_000, block_size).plan(requests)
    return plan.attention_metadata(block_size, **options)


NAMES = [
    "num_prefills",
    "num_prefill_tokens",
    "num_decode_tokens",
    "seq_lens",
    "max_query_len",
    "max_prefill_seq_len",
    "max_decode_seq_len",
    "query_start_loc",
    "seq_start_loc",
    "context_lens_tensor",
]


@pytest.mark.parametrize(
    ("parts", "expected"),
    [  # context and new tokens of two prompts of 484
        (
            [(0, 28), (0, 484)],
            (2, 512, 0, [28, 484], 484, 484, 0, [0, 28, 512], [0, 28, 512], [0, 0]),
        ),
        (
            [(484, 1), (28, 456)],
            (1, 456, 1, [485, 484], 456, 484, 485, [0, 1, 457], [0, 485, 969], [484, 28]),
        ),
        (
            [(485, 1), (484, 1)],
            (0, 0, 2, [486, 485], 1, 0, 486, [0, 1, 2], [0, 486, 971], [485, 484]),
        ),
    ],
    ids=["first chunks", "a decode next to a prompt", "two decodes"],
)
def test_two_prompts_in_chunks(parts, expected):
    tables = [[*range(1, 31), 128203], [*range(50, 80), 128172]]
    requests = [
        Request([0] * new, context, table, prompt_len=484)
        for (context, new), table in zip(parts, tables, strict=True)
    ]
    metadata = _metadata(requests)
    assert [_plain(getattr(metadata, name)) for name in NAMES] == [*expected]
    if parts[0][0] == 485:
        assert metadata.slot_mapping.tolist() == [2051253, 2050756]


def _plain(value: object) -> object:
    return value.tolist() if isinstance(value, torch.Tensor) else value


def test_five_prompts_and_their_next_tokens():
    tables = [list(range(first, first - 13, -1)) for first in (999, 986, 973, 960, 947)]
    slots = _metadata([Request([0] * 195, 0, t, prompt_len=195) for t in tables]).slot_mapping
    assert slots[:32].tolist() == [*range(15984, 16000), *range(15968, 15984)]
    assert slots[192:196].tolist() == [15792, 15793, 15794, 15776] and slots[-1] == 14962
    after = _metadata([Request([0], 195, table, prompt_len=195) for table in tables])
    assert after.block_tables.tolist() == tables and after.seq_lens == [196] * 5
    assert after.slot_mapping.tolist() == [15795, 15587, 15379, 15171, 14963]


def test_a_padded_request_has_length_zero_and_points_at_the_null_block():
    requests = [Request([1], 20, [3, 4]), Request([1, 2], 3, [7])]
    bucket = {"tokens": 6, "requests": 4, "width": 3, "unique": 99}
    metadata = _metadata(requests, bucket=bucket)
    assert metadata.block_tables.tolist() == [[3, 4, 0], [7, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert metadata.seq_lens == [21, 5, 0, 0]
    assert metadata.query_start_loc.tolist() == [0, 1, 3, 3, 3]
    assert metadata.seq_start_loc.tolist() == [0, 21, 26, 26, 26]
    assert metadata.slot_mapping.tolist() == [68, 115, 116, 0, 0, 0]
    assert metadata.use_captured_graph and not _metadata(requests).use_captured_graph


def test_tables_of_first_prefills_are_left_out_only_where_asked():
    prompt = [Request([1, 2], 0, [7])]
    assert _metadata(prompt, tables=False).block_tables.shape == (0, 0)
    assert _metadata(prompt).block_tables.tolist() == [[7]]
    chunk = [Request([1, 2], 3, [7])]
    assert _metadata(chunk, tables=False).block_tables.tolist() == [[7]]


def test_a_bucket_that_is_too_small_is_refused():
    with pytest.raises(ValueError, match="width"):
        _metadata([Request([1], 20, [3, 4])], bucket={"width": 1})


def test_a_request_in_its_prompt_is_a_prefill_until_the_prompt_is_computed():
    assert Request([1], 9, [1], prompt_len=10).is_prefill
    assert not Request([1], 10, [1], prompt_len=10).is_prefill
    assert Request([1, 2], 9, [1]).is_prefill and not Request([1], 9, [1]).is_prefill


def test_the_metadata_of_the_paged_package_is_the_one_of_the_builder():
    assert paged.AttentionMetadata is AttentionMetadata
    assert "AttentionMetadata" in paged.__all__


@pytest.mark.parametrize("padding", [0, 5])
def test_one_step_of_decodes_gives_the_same_numbers_through_every_interface(padding):
    block, scale = 4, 16**-0.5
    requests = [Request([7], 9, [3, 5, 1]), Request([8], 6, [3, 9]), Request([9], 4, [2, 8])]
    plan = BatchBuilder(12, block).plan(requests)
    rows = len(requests) + padding
    bucket = {
        "tokens": rows, "requests": rows, "width": 3 + padding,
        "shared": 2 + padding, "unique": 5 + padding, "logits": rows,
    }  # fmt: skip
    m = plan.attention_metadata(block, bucket)
    generator = torch.Generator().manual_seed(0)
    caches = torch.randn(2, 12 * block, 2, 16, generator=generator)
    query = torch.randn(rows, 4, 16, generator=generator)
    key, value = torch.randn(2, rows, 2, 16, generator=generator)

    unified, flash, packed = caches.clone(), caches.clone(), caches.clone()
    metadata = plan.fill(bucket).metadata(block)
    expected = unified_attention(query, key, value, *unified, scale, metadata)
    by_flash = FlashKVCacheAttention(*flash.unflatten(1, (-1, block)))(
        query[:, None], key[:, None], value[:, None], m.context_lens_tensor, m.block_tables
    )[:, 0]
    by_paged = PagedAttention(*packed, 2, block, scale, layout="flat")(
        query, m.block_tables, m.seq_lens_tensor, key, value, m.slot_mapping
    )
    torch.testing.assert_close(by_flash, expected)
    torch.testing.assert_close(by_paged, expected)
    assert not expected[len(requests) :].any() and expected[: len(requests)].any()
    for written in (flash, packed):
        assert torch.equal(written[:, block:], unified[:, block:])
    assert not torch.equal(unified[:, block:], caches[:, block:])


def test_rows_of_a_table_give_the_metadata_of_the_same_requests():
    requests = [Request([1], 20, [3, 4]), Request([1, 2], 3, [7])]
    table = RequestTable(3, 5)
    table.add("gone", [9])
    rows = [table.add(name, each.block_table) for name, each in zip("ab", requests, strict=True)]
    table.remove("gone")
    plan = BatchBuilder(12, 16).plan_rows(table, rows, [20, 3], [1, 2], [1, 1, 2])
    bucket = {"tokens": 4, "requests": 3, "width": 4}
    ours = dataclasses.asdict(plan.attention_metadata(16, bucket))
    for name, value in dataclasses.asdict(_metadata(requests, bucket=bucket)).items():
        same = torch.equal if isinstance(value, torch.Tensor) else lambda a, b: a == b
        assert same(ours[name], value), name
    table.extend("a", [5])
    assert table.blocks[rows[0], :3].tolist() == [3, 4, 5]
    assert ours["block_tables"].tolist() == [[3, 4, 0, 0], [7, 0, 0, 0], [0, 0, 0, 0]]
