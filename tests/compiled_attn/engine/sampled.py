"""Samples rows of logits by their settings alone, without an engine."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from compiled_attn.engine import SamplingParams
from compiled_attn.engine.logit_rules import LogitRules
from compiled_attn.engine.logprobs import RowResult
from compiled_attn.engine.sampler import SampleRequest, sample_requests


def sample_rows(
    logits: Tensor,
    params: Sequence[SamplingParams | None],
    steps: Sequence[int],
    texts: Sequence[Sequence[int]] | None = None,
) -> list[RowResult]:
    """Results of each row; without settings its most likely token."""
    rows = enumerate(zip(params, steps, texts or [()] * len(steps), strict=True))
    requests = []
    for row, (param, step, text) in rows:
        if param is not None:
            rules = LogitRules(param, len(text) - step, param.stop_token_ids)
            requests.append(SampleRequest(row, param, step, rules, text))
    return sample_requests(logits, requests)


def sample(*args, **kwargs) -> list[int]:
    """Tokens of `sample_rows`, each of which has one."""
    rows = sample_rows(*args, **kwargs)
    assert not any(row.error for row in rows)
    return [row.token for row in rows]
