"""transformers' paged attention: what passes, and what is recorded as failing."""

from __future__ import annotations

import pytest
import torch

from tests.compiled_attn.testing.adapters.work import expected, step

pytest.importorskip("transformers", reason="needs the extra hf")
from compiled_attn.testing.adapters import transformers_eager, transformers_sdpa

BOTH = pytest.mark.parametrize("adapter", [transformers_eager, transformers_sdpa])


@BOTH
@pytest.mark.parametrize("window", [None, 7])
def test_a_mixed_step_is_that_of_the_reference(adapter, window):
    arguments = step()
    got = adapter.paged_attention(**arguments, window=window)
    torch.testing.assert_close(got.double(), expected(arguments, window=window), atol=1e-5, rtol=0)


def test_eager_has_sinks():
    arguments, sinks = step(), torch.linspace(-1, 2, 4)
    got = transformers_eager.paged_attention(**arguments, sinks=sinks)
    torch.testing.assert_close(got.double(), expected(arguments, sinks=sinks), atol=1e-5, rtol=0)


@BOTH
def test_free_slots_are_not_read(adapter):
    arguments = step()
    before = adapter.paged_attention(**arguments)
    arguments["key_cache"][0] = arguments["value_cache"][0] = torch.nan
    assert torch.equal(adapter.paged_attention(**arguments), before)


@BOTH
def test_recorded_failure_nan_of_one_request_reaches_the_others(adapter):
    arguments = step()
    arguments["key_cache"][arguments["block_table"][0, 0]] = torch.nan
    assert adapter.paged_attention(**arguments).isnan().all()


@BOTH
def test_recorded_failure_a_window_of_one_key_is_ignored(adapter):
    arguments = step()
    got = adapter.paged_attention(**arguments, window=1)
    assert torch.equal(got, adapter.paged_attention(**arguments))


def test_recorded_failure_eager_ignores_the_softcap():
    arguments = step()
    got = transformers_eager.paged_attention(**arguments, softcap=0.5)
    assert torch.equal(got, transformers_eager.paged_attention(**arguments))
