"""FlexAttention over pages, in eager mode: what passes, and what is recorded as failing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_attn.testing.adapters import flex
from tests.compiled_attn.testing.adapters.work import expected, step

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def attend(arguments: dict[str, Any], **options: Any) -> Tensor:
    query, rows = arguments["query"], len(arguments["seq_lens"])
    return flex.flash_attn_with_kvcache(
        query.unflatten(0, (rows, -1)), arguments["key_cache"], arguments["value_cache"],
        cache_seqlens=arguments["seq_lens"], block_table=arguments["block_table"],
        softmax_scale=arguments["scale"], causal=True, **options,
    ).flatten(0, 1)  # fmt: skip


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ({}, {}),
        ({"window_size": (6, 0)}, {"window": 7}),
        ({"softcap": 0.5}, {"softcap": 0.5}),
        ({"alibi_slopes": torch.tensor([0.5, 0.25, 1, 0])},) * 2,
    ],
    ids=["plain", "window", "softcap", "alibi"],
)
def test_chunks_are_those_of_the_reference(given, options):
    arguments = step(counts=(3, 3, 3))
    want = expected(arguments, **options)
    torch.testing.assert_close(attend(arguments, **given).double(), want, atol=1e-5, rtol=0)


def test_new_tokens_are_written_and_seen():
    arguments = step(counts=(2, 2, 2))
    want, caches = expected(arguments), (arguments["key_cache"], arguments["value_cache"])
    new = [torch.empty(3, 2, 2, 16) for _ in caches]
    for row, length in enumerate(arguments["seq_lens"].tolist()):
        for i, at in enumerate((length - 2, length - 1)):
            block = arguments["block_table"][row, at // 16]
            for tokens, cache in zip(new, caches, strict=True):
                tokens[row, i] = cache[block, at % 16]
                cache[block, at % 16] = 0
    before = arguments | {"seq_lens": arguments["seq_lens"] - 2}
    got = attend(before, k=new[0], v=new[1])
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=0)
    torch.testing.assert_close(expected(arguments), want)


def test_a_request_without_keys_gets_zeros():
    arguments = step(counts=(1, 1, 1), lengths=(21, 0, 40))
    assert not attend(arguments)[1].any()


def test_recorded_failure_nan_in_a_free_block_is_seen():
    arguments = step(counts=(1, 1, 1))
    arguments["value_cache"][0] = torch.nan
    assert attend(arguments).isnan().all()
