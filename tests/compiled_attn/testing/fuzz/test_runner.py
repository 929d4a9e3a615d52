from __future__ import annotations

from collections import Counter

import pytest

from compiled_attn.testing.fuzz import Operation, Refused, Settings, Trace, generate, run
from tests.compiled_attn.testing.fuzz.toy import VOCAB, Toy, next_token


def trace_of(*operations: Operation, **settings: int) -> Trace:
    return Trace(Settings(**settings), operations)


ONE = Operation("submit", prompt=(1, 2, 3), new_tokens=3)


def test_a_correct_target_passes():
    counts = Counter()
    for seed in range(10):
        trace = generate(seed, Toy, 60)
        assert run(trace, Toy(trace.settings), counts) is None
    assert counts["requests"] >= 600 and counts["aborted"] and counts["tokens"] > 600


class Runner(Toy):
    """Yields the second best token."""

    def decode(self, name):
        return [(token + 1) % VOCAB for token in super().decode(name)]


@pytest.mark.parametrize(("gap", "passes"), [(1e-3, True), (0.5, False)])
def test_another_token_passes_where_logits_differ_by_less_than_rounding(gap, passes):
    """The rest of the text follows from the token that came, not from the expected one."""
    counts = Counter()
    trace = trace_of(Operation("submit", prompt=(1,), new_tokens=1))
    assert (run(trace, Runner(trace.settings, gap), counts) is None) == passes
    assert counts["ties"] == passes


def test_tokens_of_an_aborted_request_are_checked_too():
    trace = trace_of(ONE, Operation("step"), Operation("abort"))
    assert run(trace, Toy(trace.settings)) is None
    failure = run(trace, Runner(trace.settings, 0.5))
    assert failure and (failure.kind, failure.request, failure.operation) == ("tokens", 0, 1)


class Surplus(Toy):
    def step(self):
        return {name: tokens * 4 for name, tokens in super().step().items()}


class Late(Toy):
    """Goes on with aborted requests."""

    def abort(self, request, count):
        pass


class Unknown(Toy):
    def step(self):
        return {99: [1]}


class Crashing(Toy):
    def step(self):
        raise ValueError("expected this")


class Refusing(Toy):
    def submit(self, *_, **__):
        raise Refused


class Silent(Toy):
    def step(self):
        return {}


@pytest.mark.parametrize(
    ("target", "kind"),
    [
        (Surplus, "surplus"),
        (Late, "surplus"),
        (Unknown, "surplus"),
        (Crashing, "crash"),
        (Silent, "lost"),
    ],
)
def test_every_kind_of_failure_is_found(target, kind):
    trace = trace_of(ONE, Operation("step"), Operation("abort"), Operation("step"))
    if target is Silent:
        trace = trace_of(ONE)
    failure = run(trace, target(trace.settings))
    assert failure is not None and failure.kind == kind


def test_a_refused_request_is_no_failure():
    counts = Counter()
    trace = trace_of(ONE, Operation("abort"))
    assert run(trace, Refusing(trace.settings), counts) is None
    assert counts["refused"] == 1 and counts["skipped"] == 1


def test_what_is_impossible_or_unsupported_is_skipped():
    counts = Counter()
    trace = trace_of(
        Operation("share", 1, of=7, keep=2, prompt=(1,), new_tokens=1),
        Operation("abort", 7),
        Operation("defragment"),
        Operation("submit", 2, prompt=(1,) * 40, new_tokens=1),
        ONE,
        ONE,
    )
    assert run(trace, Toy(trace.settings), counts) is None
    assert counts["skipped"] == 5 and counts["requests"] == 1


def test_a_share_begins_with_generated_tokens():
    seen = []

    class Seeing(Toy):
        def submit(self, request, prompt, new_tokens, **options):
            seen.append([*prompt])
            super().submit(request, prompt, new_tokens, **options)

    share = Operation("share", 1, of=0, keep=5, prompt=(9,), new_tokens=1)
    trace = trace_of(ONE, Operation("step", count=3), share)
    assert run(trace, Seeing(trace.settings)) is None
    first = next_token((1, 2, 3))
    assert seen[1] == [1, 2, 3, first, next_token((1, 2, 3, first)), 9]
