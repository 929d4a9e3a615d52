from __future__ import annotations

import os
import sys
from collections import Counter

import pytest

from compiled_attn.testing.fuzz import Operation, Settings, Trace, generate, run
from compiled_attn.testing.fuzz.vllm_cpu import VllmCpu

FAKE = """#!{python}
import json, sys

for line in sys.stdin:
    name, *arguments = json.loads(line)
    answer = {{"result": {{"total": 1, "free": 1, "open": 0}}}}
    if name == "submit" and len(arguments[1]) > 3:
        answer = {{"error": "ValueError", "message": "too long"}}
    if name == "step":
        sys.exit(3)
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture
def fake(tmp_path):
    """An interpreter that refuses long prompts, and ends in the first step."""
    path = tmp_path / "python"
    path.write_text(FAKE.format(python=sys.executable))
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(("length", "kind"), [(4, None), (3, "crash")])
def test_refusals_and_crashes_are_told_apart(fake, length, kind):
    operation = Operation("submit", prompt=(1,) * length, new_tokens=1)
    trace, counts = Trace(Settings(block_size=32), (operation,)), Counter()
    target = VllmCpu(trace.settings, python=fake)
    try:
        failure = run(trace, target, counts)
    finally:
        target.close()
    assert (failure and failure.kind) == kind
    assert counts["refused"] == (kind is None)
    if failure:
        assert "code 3" in failure.message


@pytest.mark.vllm
def test_requests_of_vllm_pass():
    counts = Counter()
    trace = generate(0, VllmCpu, 50)
    target = VllmCpu(trace.settings, python=os.environ["VLLM_PYTHON"])
    try:
        for _ in range(2):
            assert run(trace, target, counts) is None
            assert target.reset()
    finally:
        target.close()
    assert counts["requests"] >= 100
