"""What `paged_attention_v1` and `_v2` refuse, in what words, and outputs as they were."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from compiled_attn.compat.paged import (
    PARTITION,
    PagedArgumentError,
    paged_attention_v1,
    paged_attention_v2,
)
from tests.compiled_attn.compat.paged.scene import Step


def _step(**fixed: Any) -> Step:
    return Step(**({"lengths": (5, 0, 17), "extra_width": 2} | fixed)).make()


def _refused(
    step: Step, error: type[Exception], message: str, options: Any = (), **changes
) -> None:
    """Both versions raise, and leave their outputs alone."""
    args = step.args(**changes)
    out = torch.full_like(step.query, 7.0)
    with pytest.raises(error, match=message):
        paged_attention_v1(out, *args, **dict(options))
    partials = [torch.full_like(buffer, 7.0) for buffer in step.partials(PARTITION)]
    with pytest.raises(error, match=message):
        paged_attention_v2(out, *partials, *args, **dict(options))
    for buffer in (out, *partials):
        assert buffer.eq(7.0).all()


def test_the_error_is_both_a_value_error_and_a_runtime_error() -> None:
    assert issubclass(PagedArgumentError, ValueError)
    assert issubclass(PagedArgumentError, RuntimeError)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("query", lambda t: t[0], r"query \(num_seqs, H, D\) of shape \[any, .*, got \[4, 16\]"),
        ("query", lambda t: t.long(), "query of dtype float32 or .*, got int64"),
        ("query", lambda t: t[:, :3], r"H divisible by num_kv_heads, got \(3, 2\)"),
        ("query", lambda t: t[:, :0], r"H divisible by num_kv_heads, got \(0, 2\)"),
        ("query", lambda t: t[..., :0], "head dim of at least 1, got 0"),
        ("query", lambda t: t[..., :8], r"key_cache in layout packed .*\[\d+, 2, 2, 4, 4\], got"),
        ("query", lambda t: t.half(), r"key_cache .*\[\d+, 2, 2, 4, 8\], got"),
        ("key_cache", lambda t: t[..., :2], "key_cache"),
        ("key_cache", lambda t: t.flatten(2), "key_cache .* got"),
        ("key_cache", lambda t: t[:-1], "value_cache"),
        ("key_cache", lambda t: t.double(), "key_cache of dtype float32, got float64"),
        ("value_cache", lambda t: t.half(), "value_cache of dtype float32, got float16"),
        ("value_cache", lambda t: t.transpose(2, 3), "value_cache"),
        ("block_tables", lambda t: t.float(), "block_tables of dtype int32 or int64, got float32"),
        ("block_tables", lambda t: t[:2], r"block_tables .*\[3, any\], got \[2, 7\]"),
        ("block_tables", lambda t: t[0], "block_tables"),
        ("seq_lens", lambda t: t[:2], r"seq_lens .*\[3\], got \[2\]"),
        ("seq_lens", lambda t: t.to(torch.int16), "seq_lens of dtype int32 or int64, got int16"),
        ("seq_lens", lambda t: t.unsqueeze(1), "seq_lens"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(name: str, change: Any, message: str) -> None:
    step = _step()
    _refused(step, PagedArgumentError, message, **{name: change(getattr(step, name))})


@pytest.mark.parametrize("name", ["query", "key_cache", "value_cache", "block_tables", "seq_lens"])
@pytest.mark.parametrize("value", [None, [1, 2, 3]])
def test_what_is_no_tensor_is_a_type_error(name: str, value: Any) -> None:
    got = type(value).__name__
    _refused(_step(), TypeError, f"{name}: expected a tensor .*, got {got}", **{name: value})


@pytest.mark.parametrize("name", ["query", "key_cache", "value_cache", "block_tables", "seq_lens"])
def test_another_device_is_refused(name: str) -> None:
    step = _step()
    there = {name: getattr(step, name).to("meta")}
    _refused(step, PagedArgumentError, "on (meta|cpu), got", **there)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_kv_heads": 3}, r"H divisible by num_kv_heads, got \(4, 3\)"),
        ({"num_kv_heads": 0}, "num_kv_heads of at least 1, got 0"),
        ({"num_kv_heads": 1}, r"key_cache .*, 1, 4, 4, 4\], got"),
        ({"block_size": 8}, r"key_cache .*, 8, 4\], got"),
        ({"block_size": 0}, "block_size of at least 1, got 0"),
        ({"max_seq_len": -1}, "max_seq_len of at least 0, got -1"),
        ({"kv_cache_dtype": "fp4"}, r"kv_cache_dtype of \('auto', 'fp8', .*got fp4"),
        ({"kv_cache_dtype": "fp8"}, "key_cache"),
        ({"kv_cache_dtype": "int8"}, "key_cache"),
        ({"alibi_slopes": torch.ones(2)}, r"alibi_slopes \(H,\) of shape \[4\], got \[2\]"),
        ({"alibi_slopes": torch.ones(4).int()}, "alibi_slopes of dtype"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    _refused(_step(), PagedArgumentError, message, **change)


@pytest.mark.parametrize("name", ["num_kv_heads", "block_size", "max_seq_len"])
def test_a_tensor_in_place_of_a_number_is_a_type_error(name: str) -> None:
    # Early versions took `head_mapping`, a tensor, where num_kv_heads is now.
    value = torch.zeros(4, dtype=torch.int32)
    _refused(_step(), TypeError, f"{name}: expected an int, got Tensor", **{name: value})


@pytest.mark.parametrize("value", [None, "auto", torch.tensor(0.25)])
def test_a_scale_that_is_no_number_is_a_type_error(value: Any) -> None:
    got = type(value).__name__
    _refused(_step(), TypeError, f"scale: expected a number, got {got}", scale=value)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("block", [-1, 10_000, -(2**31)])
@pytest.mark.parametrize("layout", ["packed", "flat"])
def test_a_needed_block_outside_of_the_cache_is_refused(index_dtype, block, layout):
    step = _step(index_dtype=index_dtype, layout=layout)
    step.block_tables[2, 4] = block  # token 16, the last one
    message = rf"block_tables\[2, 4\] in 0 .. {step.blocks - 1}, got {block}: the row's 17 tokens"
    _refused(step, PagedArgumentError, message, {"layout": layout})
    step.seq_lens[2] = 16  # without token 16 the entry is padding
    paged_attention_v1(torch.empty_like(step.query), *step.args(), layout=layout)


@pytest.mark.parametrize(
    ("length", "max_seq_len"), [(-1, 99), (29, 99), (18, 17), (2**31 - 1, 2**40)]
)
def test_a_length_without_room_is_refused(length: int, max_seq_len: int) -> None:
    step = _step(index_dtype=torch.int64)
    step.seq_lens[1] = length
    room = min(7 * 4, max_seq_len)
    message = rf"seq_lens\[1\] in 0 .. {room} \(block_tables has 7 columns of 4, .*got {length}"
    _refused(step, PagedArgumentError, message, max_seq_len=max_seq_len)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": "DHN"}, "a layout of"),
        ({"blocksparse_local_blocks": 16}, "block-sparse attention to be off"),
        ({"blocksparse_vert_stride": 8}, "block-sparse attention to be off"),
        ({"blocksparse_head_sliding_step": 1}, "block-sparse attention to be off"),
    ],
)
def test_options_that_are_not_supported_are_refused(options: dict[str, Any], message: str) -> None:
    _refused(_step(), PagedArgumentError, message, options)


def test_block_sparse_arguments_that_are_off_are_taken() -> None:
    step = _step()
    out = torch.empty_like(step.query)
    options = {"blocksparse_vert_stride": 1, "blocksparse_block_size": 16, "tp_rank": 3}
    step.assert_exact(paged_attention_v1(out, *step.args(), **options))


def test_a_flat_cache_that_is_no_whole_number_of_blocks_is_refused() -> None:
    step = _step(layout="flat")
    message = rf"key_cache in layout flat .*\[{(step.blocks - 1) * 4}, 2, 16\], got"
    short = {"key_cache": step.key_cache[1:], "value_cache": step.value_cache[1:]}
    _refused(step, PagedArgumentError, message, {"layout": "flat"}, **short)


def test_a_head_dim_that_x_does_not_divide_is_refused_in_the_packed_layout() -> None:
    step = _step()
    query = torch.zeros(3, 4, 18)
    _refused(step, PagedArgumentError, "divisible by x = 4 .*: use layout NHD or HND", query=query)


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
@pytest.mark.parametrize(
    ("scale", "error", "message"),
    [
        (0.0, PagedArgumentError, "a positive {}, got 0.0"),
        (math.nan, PagedArgumentError, "a positive {}, got nan"),
        (torch.ones(3), PagedArgumentError, r"{} of 1 or num_kv_heads elements, got \(3, 2\)"),
        (torch.ones(2).int(), PagedArgumentError, "{} of floats, got torch.int32"),
        (torch.ones(2, device="meta"), PagedArgumentError, "{} on cpu, got meta"),
        (None, TypeError, "{}: expected a float or a tensor, got NoneType"),
    ],
)
def test_scales_that_do_not_fit_are_refused(name, scale, error, message):
    step = _step(kv_cache_dtype="int8")
    _refused(step, error, message.format(name), **{name: scale})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t[:2], r"out like query of shape \[3, 4, 16\], got \[2, 4, 16\]"),
        (lambda t: t.double(), "out of dtype float32, got float64"),
        (lambda t: t.to("meta"), "out on cpu, got meta"),
        (lambda t: t[:1].expand(3, -1, -1), "outputs without expanded axes"),
    ],
)
def test_an_output_that_does_not_fit_is_refused(change: Any, message: str) -> None:
    step = _step()
    out = change(torch.full(step.query.shape, 7.0))
    with pytest.raises(PagedArgumentError, match=message):
        paged_attention_v1(out, *step.args())
    with pytest.raises(PagedArgumentError, match=message):
        paged_attention_v2(out, *step.partials(PARTITION), *step.args())
    assert out.is_meta or out.eq(7.0).all()


@pytest.mark.parametrize(
    ("which", "change", "message"),
    [
        (0, lambda t: t[..., :1], r"P for max_seq_len tokens.* \[3, 4, 3\], got \[3, 4, 1\]"),
        (0, lambda t: t.double(), "exp_sum of dtype float32"),
        (1, lambda t: t[..., :2], "max_logits like exp_sum"),
        (1, lambda t: t.to("meta"), "max_logits on cpu"),
        (2, lambda t: t[..., :8], r"tmp_out .*\[3, 4, 3, 16\], got \[3, 4, 3, 8\]"),
        (2, lambda t: t.half(), "tmp_out of dtype float32, got float16"),
        *((i, lambda t: t[:1].expand_as(t), "outputs without expanded axes") for i in range(3)),
    ],
)
def test_partials_that_do_not_fit_are_refused(which: int, change: Any, message: str) -> None:
    step = _step()
    buffers = [torch.zeros(3, 4, 3), torch.zeros(3, 4, 3), torch.zeros(3, 4, 3, 16)]
    buffers[which] = change(buffers[which])
    out = torch.full_like(step.query, 7.0)
    with pytest.raises(PagedArgumentError, match=message):
        paged_attention_v2(out, *buffers, *step.args(max_seq_len=1025))
    assert out.eq(7.0).all()
    assert not any(buffer.any() for buffer in buffers if not buffer.is_meta)
