"""Blocks of GGUF files against the package gguf."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("gguf", reason="needs the extra gguf")

import gguf

from compiled_attn.models.gguf_blocks import FORMATS
from compiled_attn.ops.quantised_linear import QuantisedWeight


@pytest.mark.parametrize("name", FORMATS)
def test_packed_blocks_are_what_gguf_dequantises_in_no_more_memory(name):
    form, kind = FORMATS[name], gguf.GGMLQuantizationType[name]
    inputs, size = gguf.GGML_QUANT_SIZES[kind]
    assert form.bytes == size
    draw = np.random.default_rng(0)
    blocks = draw.integers(0, 256, (32, 512 // inputs, size), dtype=np.uint8)
    scales = [208] if name == "Q6_K" else [0, 2] if name.endswith(("_1", "4_K", "5_K")) else [0]
    for at in scales:
        drawn = draw.normal(0, 0.1, (*blocks.shape[:2], 1)).astype("<f2")
        blocks[..., at : at + 2] = drawn.view(np.uint8)
    parts = form.parse(blocks)
    codes, scale, step = (
        None if each is None else torch.from_numpy(np.array(each)) for each in parts
    )
    packed = QuantisedWeight.pack(codes, form.bits, scale, step)
    expected = torch.from_numpy(gguf.dequantize(blocks.reshape(32, -1), kind))
    torch.testing.assert_close(packed.dequantise(), expected, rtol=1e-6, atol=1e-6)
    assert packed.nbytes <= 1.03 * blocks.nbytes
