"""Traces that find a change which corrupts the cache, by the fuzzer alone, then with the sanitizer.

They alone are what `python tests/mutation.py --target corruption` runs for each mutant.
"""

from __future__ import annotations

from typing import Any

import pytest

from compiled_attn.models.hf import model
from compiled_attn.testing.fuzz import Operation, Settings, Trace, generate, run
from compiled_attn.testing.fuzz.ours import Ours
from graphs import explicit
from tests.slow import slow_but

pytestmark = pytest.mark.usefixtures("one_thread", "untried")

# Seeds of short traces with preemptions, evictions, prefix hits, moves, exchanges, salts, windows.
CASES = [(kernel, seed) for seed in (3, 5, 4) for kernel in ("native", "portable")]
CASES += [("native", 1), ("portable", 1), ("native", 16), ("native", 8)]
CASES += [("native", "moved"), ("portable", "moved")]
CASES += [("native", each) for each in ("one token", "large", "returned", "cut", "compiled")]
QUICK = CASES[:2]
_AXES = "tokens", "requests"


@pytest.fixture
def untried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Does not try the last layer by rows: else the model computes all rows of most wrong ones."""
    check = model.check_equal

    def checked(*args: Any, last_only: bool = False) -> None:
        if not last_only:
            check(*args)

    monkeypatch.setattr(model, "check_equal", checked)


def filled() -> Trace:
    """Requests that fill a pool of more than 1,024 blocks, which its sets keep in several words."""
    settings = Settings(block_size=1, num_blocks=1050, max_seqs=8, max_tokens=160, context=160)
    prompts = [tuple(1 + (n * n * at + at) % 60 for at in range(150)) for n in range(10)]
    made = [Operation("submit", n, prompt=each, new_tokens=4) for n, each in enumerate(prompts)]
    return Trace(settings, tuple(made))


def moved() -> Trace:
    """A request comes back with as many blocks and the same last one, but another first one.

    Both compute the first block of their prompts. While request 1 waits, 0 takes the one of 1.
    """
    settings = Settings(block_size=4, num_blocks=12, max_seqs=2, max_tokens=16, context=24)
    made = (
        Operation("submit", 0, prompt=(5, 6, 7, 8, 9, 10, 11, 12), new_tokens=6),
        Operation("submit", 1, prompt=(5, 6, 7, 8, 13), new_tokens=6),
        Operation("step"),
        Operation("preempt"),
        Operation("step", count=8),
    )
    return Trace(settings, made)


def one_token() -> Trace:
    """A prompt of one token, whose block is found; yet its logits must be computed."""
    made = (Operation("submit", n, prompt=(5,), new_tokens=2) for n in range(2))
    settings = Settings(block_size=1, num_blocks=12, max_seqs=1, max_tokens=4, context=8)
    return Trace(settings, tuple(made))


def returned() -> Trace:
    """Requests that take all of 1,029 blocks; those of two are free later, and are taken again.

    Three compute one prompt at the same time, of which only one is kept.
    """
    settings = Settings(block_size=1, num_blocks=1029, max_seqs=3, max_tokens=1050, context=350)
    prompts = [tuple(1 + (n * at * at + at) % 60 for at in range(342)) for n in (0, 0, 0, 1, 2)]
    made = [Operation("submit", n, prompt=each, new_tokens=2) for n, each in enumerate(prompts)]
    return Trace(settings, (*made[:3], Operation("step", count=3), *made[3:]))


TRACES = {"moved": moved, "one token": one_token, "large": filled, "returned": returned}


def no_failure(kernel: str, seed: int | str, **config: object) -> None:
    if seed in TRACES:
        trace = TRACES[str(seed)]()
    elif seed == "cut":  # steps that no bucket holds
        trace = generate(5, Ours, 25)
        config |= {"buckets": explicit(_AXES, [(5, 3)]), "strict": False}
    elif seed == "compiled":  # the last layer writes all rows, and reads some
        settings = Settings(block_size=4, num_blocks=12, max_seqs=3, max_tokens=8, context=24)
        trace = generate(5, Ours, 25, settings)
        config |= {"buckets": explicit(_AXES, [(8, 3)]), "backend": "aot_eager"}
    else:
        trace = generate(int(seed), Ours, 25)
    failure = run(trace, Ours(trace.settings, kernel=kernel, **config))
    assert failure is None, f"{trace.settings}: {failure}"


@pytest.mark.parametrize(("kernel", "seed"), slow_but(QUICK, CASES))
def test_fuzzer(kernel: str, seed: int | str) -> None:
    no_failure(kernel, seed)


@pytest.mark.parametrize(("kernel", "seed"), slow_but(QUICK, CASES))
def test_fuzzer_and_sanitizer(kernel: str, seed: int | str) -> None:
    no_failure(kernel, seed, sanitize=True)
