"""Traces of requests that fork in the block pool: they find a copy on write that goes wrong."""

from __future__ import annotations

from collections import Counter

import pytest

from compiled_attn.testing.fuzz import Operation, Settings, Trace, generate, run
from tests.compiled_attn.testing.fuzz.forks import Forks
from tests.compiled_attn.testing.fuzz.toy import next_token

pytestmark = pytest.mark.usefixtures("one_thread", "without_gradients")


def repeated() -> Trace:
    """A prompt that goes on, after its first block twice, as a fork went on after that block."""
    new = next_token((1, 1, 1))
    return Trace(
        Settings(block_size=2, num_blocks=30, max_seqs=4, max_tokens=16, context=24),
        (
            Operation("fork", 0, prompt=(1, 1, 1), new_tokens=4, count=2),
            Operation("step", count=5),
            Operation("submit", 10, prompt=(1, 1, 1, 1, 5), new_tokens=1),
            Operation("step", count=2),
            Operation("submit", 11, prompt=(1, 1, 1, 1, 1, new, 7), new_tokens=1),
        ),
    )


def no_failure(seeds: range = range(8), **options: bool) -> Counter[str]:
    counts: Counter[str] = Counter()
    for trace in (repeated(), *(generate(seed, Forks, 25) for seed in seeds)):
        target = Forks(trace.settings, **options)
        failure = run(trace, target, counts)
        assert failure is None, f"{trace.settings}: {failure}"
        target.close()
    return counts


def test_blocks_are_copied() -> None:
    """Not one of what `mutation.py` runs: a wrong count corrupts nothing."""
    assert no_failure(range(4))["copies"]


def test_fuzzer() -> None:
    no_failure()


def test_fuzzer_and_sanitizer() -> None:
    no_failure(sanitize=True)
