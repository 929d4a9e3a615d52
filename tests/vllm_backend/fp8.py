"""A layer over a cache of bytes against softmax in float64 over the same rounded keys and values.

    VLLM_PYTHON tests/vllm_backend/fp8.py

The largest error for each fp8 dtype, as a line of JSON; scales other than one, a window.
"""

from __future__ import annotations

import json
from types import SimpleNamespace

import torch
from torch import Tensor

BLOCKS, HEADS, KV_HEADS, SIZE, DIM, TOKENS, WINDOW = 8, 4, 2, 32, 32, 70, 40
SCALES = 0.5, 0.25


def rounded(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    return (x / scale).to(dtype).double() * scale


def expected(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (each.repeat_interleave(HEADS // KV_HEADS, 1) for each in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * DIM**-0.5
    positions = torch.arange(TOKENS)
    distance = positions[:, None] - positions
    scores = scores.masked_fill((distance < 0) | (distance >= WINDOW), -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


def error(name: str, dtype: torch.dtype) -> float:
    from compiled_attn.contrib.vllm.backend import PagedAttentionImpl

    impl = object.__new__(PagedAttentionImpl)
    impl.__dict__ |= {
        "kv_cache_dtype": name, "is_fp8_kv_cache": True, "kv_sharing_target_layer_name": None,
        "scale": DIM**-0.5, "_window": WINDOW, "_softcap": None, "alibi_slopes": None,
        "sinks": None, "_scales": {},
    }  # fmt: skip
    layer = SimpleNamespace(_k_scale_float=SCALES[0], _v_scale_float=SCALES[1])
    table = torch.tensor([[5, 2, 7]], dtype=torch.int32)
    positions = torch.arange(TOKENS)
    step = SimpleNamespace(
        num_actual_tokens=TOKENS,
        block_table=table,
        seq_lens=torch.tensor([TOKENS], dtype=torch.int32),
        query_start_loc=torch.tensor([0, TOKENS], dtype=torch.int32),
        slot_mapping=table[0].long()[positions // SIZE] * SIZE + positions % SIZE,
        causal=True,
    )
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(TOKENS, h, DIM, generator=generator) for h in (HEADS, KV_HEADS, KV_HEADS)
    )
    cache = torch.zeros(BLOCKS, KV_HEADS, SIZE, 2 * DIM, dtype=torch.uint8)
    out = torch.empty(TOKENS, HEADS, DIM)
    impl._attend(layer, q, k, v, cache, step, out)
    exact = expected(q, rounded(k, SCALES[0], dtype), rounded(v, SCALES[1], dtype))
    return float((out - exact).abs().max())


def main() -> None:
    from compiled_attn.ops import load

    load(strict=True)
    types = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
    print(json.dumps({name: error(name, dtype) for name, dtype in types.items()}))


if __name__ == "__main__":
    main()
