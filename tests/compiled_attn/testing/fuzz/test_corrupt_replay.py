"""Traces on replayed graphs: they find a change of the recorder that corrupts what a step computes.

Recordings are not verified here: else the engine itself refuses most of the wrong ones.
"""

from __future__ import annotations

import pytest

from compiled_attn.engine import local
from compiled_attn.testing.fuzz import Settings, generate, run
from compiled_attn.testing.fuzz.ours import Ours
from graphs.torch_internals.replay.replay import REPLAY, Replays

pytestmark = [pytest.mark.usefixtures("compiler", "one_thread", "unverified"), pytest.mark.slow]

# Of the larger sizes, a graph that is replayed for smaller ones reads what is no input of theirs.
SIZES = (
    Settings(block_size=4, num_blocks=12, max_seqs=3, max_tokens=8, context=24),
    Settings(block_size=4, num_blocks=40, max_seqs=4, max_tokens=64, context=64),
)


@pytest.fixture
def unverified(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Replays
    monkeypatch.setattr(local, "Replays", lambda replayer, verify: made(replayer, verify=False))


def replayed_traces(settings: Settings, seeds: range, sanitize: bool = False) -> Ours:
    target = Ours(settings, kernel="native", backend="inductor", sanitize=sanitize)
    warmup = target.engine.warmup_report
    # What fails in the warmup would only cost time: one graph serves all sizes, or replays are off.
    assert warmup and not [each.why_alone for each in warmup.results if each.why_alone]
    assert REPLAY.is_on
    for seed in seeds:
        failure = run(generate(seed, Ours, 25, settings), target)
        assert failure is None, str(failure)
    return target


@pytest.mark.parametrize("settings", SIZES)
def test_steps_are_replayed(settings: Settings) -> None:
    """Not one of what `mutation.py` runs: a recording that is refused corrupts nothing."""
    report = replayed_traces(settings, range(1)).engine.report()
    assert report.replays == report.steps > 0


@pytest.mark.parametrize("settings", SIZES)
def test_fuzzer(settings: Settings) -> None:
    replayed_traces(settings, range(3))


@pytest.mark.parametrize("settings", SIZES)
def test_fuzzer_and_sanitizer(settings: Settings) -> None:
    replayed_traces(settings, range(3), sanitize=True)
