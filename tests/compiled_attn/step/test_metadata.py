"""Step metadata: recorded golden values, padding, and one step for several interfaces."""

from __future__ import annotations

import dataclasses

import expecttest
import pytest
import torch

from compiled_attn import FlashKVCacheAttention, PagedAttention, unified_attention
from compiled_attn.compat import paged
from compiled_attn.step import AttentionMetadata, BatchBuilder, Request, RequestTable


def _summary(metadata: AttentionMetadata, *fields: str) -> str:
    values = dataclasses.asdict(metadata)
    lines = []
    for field in fields:
        value = values[field]
        lines.append(f"{field}: {value.tolist() if isinstance(value, torch.Tensor) else value}")
    return "\n".join(lines) + "\n"


def _metadata(requests: list[Request], block_size: int = 16, **options) -> AttentionMetadata:
    plan = BatchBuilder(200_000, block_size).plan(requests)
    return plan.attention_metadata(block_size, **options)


def _prompts_195() -> list[list[int]]:
    return [list(range(first, first - 13, -1)) for first in (999, 986, 973, 960, 947)]


COUNTS = (
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
)


class TestGoldenValues(expecttest.TestCase):
    def test_first_chunk_of_two_prompts(self):
        tables = [list(range(1, 40)), list(range(50, 90))]
        requests = [
            Request([0] * 28, 0, tables[0], 0, prompt_len=484),
            Request([0] * 484, 0, tables[1], 1, prompt_len=484),
        ]
        self.assertExpectedInline(
            _summary(_metadata(requests), *COUNTS),
            """\
num_prefills: 2
num_prefill_tokens: 512
num_decode_tokens: 0
seq_lens: [28, 484]
max_query_len: 484
max_prefill_seq_len: 484
max_decode_seq_len: 0
query_start_loc: [0, 28, 512]
seq_start_loc: [0, 28, 512]
context_lens_tensor: [0, 0]
""",
        )

    def test_one_decodes_while_one_finishes_its_prompt(self):
        tables = [list(range(1, 40)), list(range(50, 90))]
        requests = [
            Request([0], 484, tables[0], prompt_len=484),
            Request([0] * 456, 28, tables[1], prompt_len=484),
        ]
        self.assertExpectedInline(
            _summary(_metadata(requests), *COUNTS),
            """\
num_prefills: 1
num_prefill_tokens: 456
num_decode_tokens: 1
seq_lens: [485, 484]
max_query_len: 456
max_prefill_seq_len: 484
max_decode_seq_len: 485
query_start_loc: [0, 1, 457]
seq_start_loc: [0, 485, 969]
context_lens_tensor: [484, 28]
""",
        )

    def test_two_decodes(self):
        tables = [[*range(1, 31), 128203], [*range(50, 80), 128172]]
        requests = [
            Request([0], 485, tables[0], prompt_len=484),
            Request([0], 484, tables[1], prompt_len=484),
        ]
        self.assertExpectedInline(
            _summary(_metadata(requests), "slot_mapping", *COUNTS),
            """\
slot_mapping: [2051253, 2050756]
num_prefills: 0
num_prefill_tokens: 0
num_decode_tokens: 2
seq_lens: [486, 485]
max_query_len: 1
max_prefill_seq_len: 0
max_decode_seq_len: 486
query_start_loc: [0, 1, 2]
seq_start_loc: [0, 486, 971]
context_lens_tensor: [485, 484]
""",
        )

    def test_five_prompts(self):
        requests = [Request([0] * 195, 0, table, prompt_len=195) for table in _prompts_195()]
        metadata = _metadata(requests)
        slots = metadata.slot_mapping.tolist()
        assert slots[:16] == list(range(15984, 16000)) and slots[16:32] == list(range(15968, 15984))
        assert slots[192:196] == [15792, 15793, 15794, 15776] and slots[-1] == 14962
        self.assertExpectedInline(
            _summary(metadata, "num_prefills", "num_prefill_tokens", "num_decode_tokens"),
            """\
num_prefills: 5
num_prefill_tokens: 975
num_decode_tokens: 0
""",
        )

    def test_the_next_token_of_five_prompts(self):
        requests = [Request([0], 195, table, prompt_len=195) for table in _prompts_195()]
        metadata = _metadata(requests)
        assert metadata.block_tables.tolist() == _prompts_195()
        self.assertExpectedInline(
            _summary(
                metadata, "num_decode_tokens", "seq_lens", "max_decode_seq_len", "slot_mapping"
            ),
            """\
num_decode_tokens: 5
seq_lens: [196, 196, 196, 196, 196]
max_decode_seq_len: 196
slot_mapping: [15795, 15587, 15379, 15171, 14963]
""",
        )


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
