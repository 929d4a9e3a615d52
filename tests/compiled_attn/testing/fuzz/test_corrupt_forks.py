"""Traces of requests that fork in the block pool: they find a copy on write that goes wrong."""

from __future__ import annotations

from collections import Counter

import pytest

from compiled_attn.testing.fuzz import generate, run
from tests.compiled_attn.testing.fuzz.forks import Forks

pytestmark = pytest.mark.usefixtures("one_thread", "without_gradients")


def no_failure(**options: bool) -> Counter[str]:
    counts: Counter[str] = Counter()
    for seed in range(8):
        trace = generate(seed, Forks, 25)
        target = Forks(trace.settings, **options)
        failure = run(trace, target, counts)
        assert failure is None, f"{trace.settings}: {failure}"
        target.close()
    return counts


def test_fuzzer() -> None:
    assert no_failure()["copies"] > 5


def test_fuzzer_and_sanitizer() -> None:
    no_failure(sanitize=True)
