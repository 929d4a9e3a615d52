from __future__ import annotations

from collections import Counter

import pytest
import transformers
from packaging.version import Version

from compiled_attn.testing.fuzz import Operation, Settings, Trace, generate, run
from compiled_attn.testing.fuzz.transformers_batching import TransformersBatching

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(
        Version(transformers.__version__) < Version("5.24"), reason="its scheduler was another"
    ),
]


@pytest.mark.parametrize("attention", ["sdpa", "paged|eager"])
def test_requests_pass(attention):
    counts = Counter()
    trace = generate(4, TransformersBatching, 30, Settings("gemma3_text", 4, 12, 3, 16, 32))
    assert run(trace, TransformersBatching(trace.settings, attention), counts) is None
    assert counts["requests"] + counts["refused"] + counts["skipped"] >= 30 and counts["tokens"]


def test_what_is_known_to_fail_is_avoided():
    operation = Operation("fork", prompt=(1,), new_tokens=1, count=2)
    trace, counts = Trace(Settings(), (operation,)), Counter()
    assert run(trace, TransformersBatching(trace.settings), counts) is None
    assert counts["refused"] == 2
