"""A reference: a model whose keys and values are rounded to 8 bits as in a cache."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from tests.oracle import dense, store

KINDS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def rounded_logits(model: PreTrainedModel, text: list[int], kind: str) -> Tensor:
    """Logits ``[T, vocab]`` of a text in one plain forward: float64 attention, dense, uncached."""

    def attention(module, query, key, value, attention_mask, *, sliding_window=None, **_):
        rows = (each[0].transpose(0, 1) for each in (query, key, value))
        queries, *both = rows
        keys, values = (store(each, KINDS[kind])[2] for each in both)
        out, _ = dense(queries, keys, values, sliding_window=sliding_window)
        return out.to(query.dtype).unsqueeze(0), None

    AttentionInterface.register("rounded_reference", attention)
    before = model.config._attn_implementation
    model.set_attn_implementation("rounded_reference")
    try:
        with torch.no_grad():
            return model(torch.tensor([text]), use_cache=False).logits[0]
    finally:
        model.set_attn_implementation(before)
