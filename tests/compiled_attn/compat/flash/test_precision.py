"""Float64 keeps its precision whatever changes the scores."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compiled_attn.compat.flash import flash_attn_with_kvcache, flash_attn_with_kvcache_reference
from compiled_attn.compat.flash.key_slice import attend_fused, attend_plain, attend_sdpa
from tests.compiled_attn.compat.flash.cases import Case


@pytest.mark.parametrize("form", [attend_plain, attend_fused, attend_sdpa, None])
@pytest.mark.parametrize("alibi", ["heads", "rows"])
def test_float64_has_the_accuracy_of_float64_under_alibi(
    form: Any, alibi: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(dtype=torch.float64, queries=3, capacity=60, lengths=[60, 41], alibi=alibi).make()
    case.args["alibi_slopes"] /= 7  # times a distance none of them is a float32
    function = flash_attn_with_kvcache_reference if form is None else flash_attn_with_kvcache
    monkeypatch.setattr("compiled_attn.compat.flash.forward.select_attend", lambda *_: form)
    for got, want in zip(case.run(function), case.expected(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
