"""Traces on replayed graphs: they find a change of the recorder that corrupts what a step computes.

Recordings are not verified here: else the engine itself refuses most of the wrong ones.
"""

from __future__ import annotations

import pytest

from compiled_attn.engine import local
from compiled_attn.testing.fuzz import Settings, generate, run
from compiled_attn.testing.fuzz.ours import Ours
from graphs.torch_internals.replay.replay import Replays

pytestmark = [pytest.mark.usefixtures("compiler", "one_thread", "unverified"), pytest.mark.slow]

SETTINGS = Settings(block_size=4, num_blocks=12, max_seqs=3, max_tokens=8, context=24)


@pytest.fixture
def unverified(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Replays
    monkeypatch.setattr(local, "Replays", lambda replayer, verify: made(replayer, verify=False))


def replayed_traces(seeds: range, sanitize: bool = False) -> Ours:
    target = Ours(SETTINGS, kernel="native", backend="inductor", sanitize=sanitize)
    for seed in seeds:
        failure = run(generate(seed, Ours, 25, SETTINGS), target)
        assert failure is None, str(failure)
    return target


def test_steps_are_replayed() -> None:
    """Not one of what `mutation.py` runs: a recording that is refused corrupts nothing."""
    report = replayed_traces(range(1)).engine.report()
    assert report.replays == report.steps > 0


def test_fuzzer() -> None:
    replayed_traces(range(3))


def test_fuzzer_and_sanitizer() -> None:
    replayed_traces(range(3), sanitize=True)
