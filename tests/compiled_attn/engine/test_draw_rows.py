"""The settings of draws as tensors: the op draws with them what the settings say."""

from __future__ import annotations

import numpy as np
import torch

from compiled_attn.engine import SamplingParams, sample
from compiled_attn.engine.draw_rows import DrawRows
from compiled_attn.engine.uniform import uniforms
from compiled_attn.ops.drawn_tokens import likely, reference

VOCAB = 300


def logits_of(rows: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(0))


def test_rows_without_a_draw_give_their_most_likely_token():
    logits = logits_of(4)
    assert torch.equal(reference(logits, *DrawRows.padding(4)), likely(logits))
    settings = DrawRows.of([2], [SamplingParams(temperature=9.0)], np.array([0.7]), 4, VOCAB)
    tokens = reference(logits, *settings)
    others = [0, 1, 3]
    assert torch.equal(tokens[others], likely(logits)[others])
    assert tokens[2] != likely(logits)[2]


def test_a_top_k_beyond_64_bits_keeps_all():
    params = SamplingParams(temperature=1.0, top_k=10**30, seed=5)
    settings = DrawRows.of([0], [params], uniforms([5], [0]), 1, VOCAB)
    assert settings.top_k.tolist() == [VOCAB]
    assert reference(logits_of(1), *settings).tolist() == sample(logits_of(1), [params], [0])
