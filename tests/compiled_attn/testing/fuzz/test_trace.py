from __future__ import annotations

import pytest

from compiled_attn.testing.fuzz import Operation, Settings, Trace, TraceError, generate
from compiled_attn.testing.fuzz.ours import Ours


def test_json_holds_everything():
    for seed in range(5):
        trace = generate(seed, Ours, 50)
        assert Trace.from_json(trace.to_json()) == trace
    assert Trace.from_json(Trace(Settings(), ()).to_json()).operations == ()


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("{", "JSON"),
        ("[]", "list"),
        ('{"settings": {}}', "settings"),
        ('{"settings": {}, "operations": 1}', "int"),
        ('{"settings": {"blocks": 1}, "operations": []}', "blocks"),
        ('{"settings": {"num_blocks": "1"}, "operations": []}', "num_blocks"),
        ('{"settings": {}, "operations": [{"kind": "sumbit"}]}', "sumbit"),
        ('{"settings": {}, "operations": [{"kind": "submit", "prompt": [1.5]}]}', "prompt"),
        ('{"settings": {}, "operations": [3]}', "operation 0"),
    ],
)
def test_what_is_no_trace_is_one_line(text, names):
    with pytest.raises(TraceError, match=names) as caught:
        Trace.from_json(text)
    assert "\n" not in str(caught.value)


def test_requests_count_continuations():
    operations = Operation("submit"), Operation("fork", 1, count=3), Operation("step", count=9)
    assert Trace(Settings(), operations).requests == 4
