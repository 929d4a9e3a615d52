"""The most likely tokens of rows are the first of the sorted rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from compiled_attn.engine.logprobs import most_likely

VOCABULARIES = [1, 5, 300, 2047, 2048, 2100, 5003]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spread", [0.0, 0.01, 3.0])
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_the_first_tokens_are_those_of_the_sorted_row(vocab, spread, dtype):
    chance = torch.Generator().manual_seed(vocab)
    logits = (spread * torch.randn(4, vocab, generator=chance)).to(dtype)
    logits[1] = 7.0
    logits[2, vocab // 2 :] = -torch.inf
    logits[3] = torch.where(logits[3] > 0, 0.0, -0.0)
    rows = logits.double().numpy()
    order = np.argsort(-rows, axis=1, kind="stable")
    for count in (1, 2, 40, 1000, 6000):
        values, ids = most_likely(logits, count)
        assert (ids == order[:, :count]).all()
        assert (values == np.take_along_axis(rows, ids, 1)).all()
