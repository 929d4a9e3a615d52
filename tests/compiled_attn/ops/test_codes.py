"""Every number of 8 and 16 bits that a cache can hold is read as what it is."""

from __future__ import annotations

import pytest
import torch

from tests.compiled_attn.ops.kernels import BEST, SLOW, loaded

CODES = [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8]


def attend(isa, query, key, value):
    """Attends rows ``[rows, D]`` to ``[tokens, D]``, all of which they see."""
    tokens, rows = len(key), len(query)
    caches = (each.view(1, tokens, 1, -1) for each in (key, value))
    names = ["key_scale", "value_scale"] if key.dtype in CODES else []
    scales = dict.fromkeys(names, torch.ones(1, tokens, 1))
    table, lengths = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([tokens], dtype=torch.int32)
    call = query.unsqueeze(1), *caches, table, lengths, torch.tensor([0, rows], dtype=torch.int32)
    return loaded(isa).paged_attention(*call, 1.0, causal=False, **scales)[0].squeeze(1)


def alone(isa, values, rows):
    """Attends rows to a single token, so that each result is its value."""
    query = torch.zeros(rows, len(values))
    query = query if values.dtype in CODES else query.to(values.dtype)
    return attend(isa, query, values[None], values[None])


@pytest.mark.parametrize("isa", [BEST, *SLOW])
@pytest.mark.parametrize("rows", [1, 3, 40])  # a decode, drafts, a prompt
@pytest.mark.parametrize("dtype", CODES, ids=str)
def test_all_codes(isa, dtype, rows):
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    codes = codes[codes.float().isfinite()]
    codes = torch.cat([codes, codes[: 256 - len(codes)]])
    want = codes.float().expand(rows, -1)
    assert torch.equal(alone(isa, codes, rows), want)


@pytest.mark.parametrize("isa", [BEST, *SLOW])
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("dtype", CODES[:2], ids=str)
def test_codes_that_are_no_numbers(isa, dtype, rows):
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    special = codes[~codes.float().isfinite()]
    for code in special:  # an infinite one times a weight of zero may be NaN
        made = alone(isa, code.expand(16).contiguous(), rows)
        assert not made.isfinite().any()
        if code.float().isnan():
            assert made.isnan().all()


@pytest.mark.parametrize("isa", [BEST, *SLOW])
@pytest.mark.parametrize("rows", [1, 3])
def test_all_finite_bfloat16(isa, rows):
    every = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    every = every[every.float().abs() >= 2.0**-126]
    every = every[every.isfinite()]
    for part in every[: len(every) // 256 * 256].view(-1, 256):
        assert torch.equal(alone(isa, part, rows), part.expand(rows, -1))


@pytest.mark.parametrize("isa", [BEST, *SLOW])
@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("dim", [64, 80])
def test_the_smallest_codes_are_those_of_dense_attention(isa, rows, dim):
    generator = torch.Generator().manual_seed(rows)
    codes = torch.randint(0, 16, (2, 70, dim), generator=generator)
    codes += 128 * torch.randint(0, 2, codes.shape, generator=generator)
    key, value = codes.to(torch.uint8).view(torch.float8_e4m3fn)
    query = torch.randn(rows, dim, generator=generator) * 40
    weights = (query.double() @ key.double().T).softmax(-1)
    torch.testing.assert_close(
        attend(isa, query, key, value).double(), weights @ value.double(), atol=1e-7, rtol=2e-5
    )


@pytest.mark.parametrize("isa", [BEST, *SLOW])
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize("token", [0, 69])
@pytest.mark.parametrize("dim", [80, 96])
def test_one_nan_among_codes(isa, rows, code, token, dim):
    finite = torch.ones(70, dim).to(torch.float8_e4m3fn)
    for element in (0, 17, 31, 32, dim - 1):
        poisoned = finite.view(torch.uint8).clone()
        poisoned[token, element] = code
        poisoned = poisoned.view(torch.float8_e4m3fn)
        assert attend(isa, torch.ones(rows, dim), poisoned, finite).isnan().all()
        made = attend(isa, torch.ones(rows, dim), finite, poisoned)
        assert made[:, element].isnan().all()
        assert made.isnan().sum() == rows
