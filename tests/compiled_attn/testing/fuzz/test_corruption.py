"""Traces that find a change which corrupts the cache, by the fuzzer alone, then with the sanitizer.

They alone are what `python tests/mutation.py --target corruption` runs for each mutant.
"""

from __future__ import annotations

import pytest

from compiled_attn.testing.fuzz import Operation, Settings, Trace, generate, run
from compiled_attn.testing.fuzz.ours import Ours
from graphs import explicit
from tests.slow import slow_but

pytestmark = pytest.mark.usefixtures("one_thread")

# Seeds of short traces with preemptions, evictions, prefix hits, moves, exchanges, salts, windows.
CASES = [(kernel, seed) for seed in (3, 5, 4) for kernel in ("native", "portable")]
CASES += [("native", 1), ("portable", 1), ("native", 16), ("native", 8)]
CASES += [("native", "large"), ("native", "cut")]
QUICK = CASES[:2]


def filled() -> Trace:
    """Requests that fill a pool of more than 1,024 blocks, which its sets keep in several words."""
    settings = Settings(block_size=1, num_blocks=1050, max_seqs=8, max_tokens=160, context=160)
    prompts = [tuple(1 + (n * n * at + at) % 60 for at in range(150)) for n in range(10)]
    made = [Operation("submit", n, prompt=each, new_tokens=4) for n, each in enumerate(prompts)]
    return Trace(settings, tuple(made))


def no_failure(kernel: str, seed: int | str, **config: object) -> None:
    trace = filled() if seed == "large" else generate(5 if seed == "cut" else int(seed), Ours, 25)
    if seed == "cut":  # steps that no bucket holds
        config |= {"buckets": explicit(("tokens", "requests"), [(5, 3)]), "strict": False}
    failure = run(trace, Ours(trace.settings, kernel=kernel, **config))
    assert failure is None, f"{trace.settings}: {failure}"


@pytest.mark.parametrize(("kernel", "seed"), slow_but(QUICK, CASES))
def test_fuzzer(kernel: str, seed: int | str) -> None:
    no_failure(kernel, seed)


@pytest.mark.parametrize(("kernel", "seed"), slow_but(QUICK, CASES))
def test_fuzzer_and_sanitizer(kernel: str, seed: int | str) -> None:
    no_failure(kernel, seed, sanitize=True)
