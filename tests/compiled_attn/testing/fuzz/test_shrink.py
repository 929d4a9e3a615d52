from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from compiled_attn.testing.fuzz import Failure, Trace, generate, run, script, shrink
from tests.compiled_attn.testing.fuzz.toy import Toy, with_bug


def first_failure(kind: type[Toy]) -> tuple[Trace, Failure]:
    for seed in range(50):
        trace = generate(seed, kind, 60)
        if failure := run(trace, kind(trace.settings)):
            return trace, failure
    raise AssertionError("expected a failure within 50 traces")


@pytest.mark.parametrize(
    ("bug", "kind", "most"),
    [
        ("lost", "lost", 6),
        ("swapped", "tokens", 2),
        ("leak", "invariant", 3),
        ("dropped", "lost", 4),
    ],
)
def test_a_planted_bug_shrinks_to_a_few_operations(bug, kind, most):
    target = with_bug(bug)
    trace, failure = first_failure(target)
    runs = 0

    def fails(smaller: Trace) -> bool:
        nonlocal runs
        runs += 1
        found = run(smaller, target(smaller.settings))
        return found is not None and found.kind == failure.kind

    small = shrink(trace, fails, 400)
    assert failure.kind == kind and runs <= 400
    assert fails(small) and len(small.operations) <= most < len(trace.operations)
    assert shrink(trace, fails, 400) == small


def test_the_number_of_runs_is_bounded():
    trace, runs = generate(0, Toy, 60), []
    small = shrink(trace, lambda each: runs.append(each) or len(each.operations) > 20, 9)
    assert len(runs) == 9 and 20 < len(small.operations) < len(trace.operations)


def test_a_script_runs_alone(tmp_path):
    trace = generate(0, Toy, 3)
    path = tmp_path / "failure.py"
    path.write_text(script(trace, Toy, {"gap": 0.5}, 'say "\\x"'))
    done = run_script(path)
    assert done.returncode == 0, done.stderr
    path.write_text(script(trace, Broken, {}, "broken"))
    done = run_script(path)
    assert done.returncode == 1 and done.stderr.startswith("tokens at operation")


class Broken(Toy):
    def decode(self, name):
        return [token + 1 for token in super().decode(name)]


def run_script(path: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])}
    return subprocess.run([sys.executable, path], capture_output=True, text=True, env=environment)
