"""Traces that find a change which corrupts the cache, by the fuzzer alone, then with the sanitizer.

They alone are what `python tests/mutation.py --target corruption` runs for each mutant.
"""

from __future__ import annotations

import pytest

from compiled_attn.testing.fuzz import generate, run
from compiled_attn.testing.fuzz.ours import Ours
from tests.slow import slow_but

pytestmark = pytest.mark.usefixtures("one_thread")

# Seeds of short traces with preemptions, evictions, prefix hits, moves, exchanges, salts, windows.
CASES = [(kernel, seed) for seed in (3, 5, 4) for kernel in ("native", "portable")]
CASES += [("native", 16), ("native", 8)]
QUICK = CASES[:2]


def no_failure(kernel: str, seed: int, **config: object) -> None:
    trace = generate(seed, Ours, 25)
    failure = run(trace, Ours(trace.settings, kernel=kernel, **config))
    assert failure is None, f"{trace.settings}: {failure}"


@pytest.mark.parametrize(("kernel", "seed"), slow_but(QUICK, CASES))
def test_fuzzer(kernel: str, seed: int) -> None:
    no_failure(kernel, seed)


@pytest.mark.parametrize(("kernel", "seed"), slow_but(QUICK, CASES))
def test_fuzzer_and_sanitizer(kernel: str, seed: int) -> None:
    no_failure(kernel, seed, sanitize=True)
