"""Traces, synthetic workloads, scaling and prompts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiled_attn.workloads import (
    KINDS,
    Arrival,
    TraceError,
    fit,
    fit_scale,
    prompts,
    read_trace,
    scaled,
    synthetic,
)

HEADER = "arrival_s,prompt_tokens,output_tokens\n"
TRACES = Path(__file__).parents[4] / "shared" / "traces"
with_traces = pytest.mark.skipif(not TRACES.is_dir(), reason=f"no traces at {TRACES}")

ONE = [Arrival(0.0, 1, 1)]
lengths = st.integers(1, 5000)


@st.composite
def arrivals(draw: st.DrawFn) -> Arrival:
    hash_block = draw(st.integers(1, 600))
    prompt_tokens = draw(lengths)
    ids = st.lists(st.integers(0, 9), max_size=-(-prompt_tokens // hash_block))
    return Arrival(0.0, prompt_tokens, draw(lengths), tuple(draw(ids)), hash_block)


def written(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text, encoding="utf-8")
    return path


def row(**changes: object) -> str:
    fields = {"arrival_s": 1.5, "prompt_tokens": 70, "output_tokens": 3} | changes
    return json.dumps({key: value for key, value in fields.items() if value is not None})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            HEADER + "0.000,4808,10\n\n0.052,3180,8\n",
            [Arrival(0.0, 4808, 10), Arrival(0.052, 3180, 8)],
        ),
        ("\ufeffuser,output_tokens,arrival_s,prompt_tokens\nann,1,2,3\n", [Arrival(2.0, 3, 1)]),
        (row(hash_ids=[4, 5, 6], hash_block=32) + "\n", [Arrival(1.5, 70, 3, (4, 5, 6), 32)]),
        (row(hash_ids=[4]), [Arrival(1.5, 70, 3, (4,), 512)]),
        (row(hash_ids=[4, 5, 6, 7], hash_block=32), [Arrival(1.5, 70, 3, (4, 5, 6), 32)]),
    ],
    ids=["csv", "any columns", "json", "default block", "ids beyond the prompt"],
)
def test_rows_of_both_formats_are_read(tmp_path: Path, text: str, expected: list[Arrival]) -> None:
    assert read_trace(written(tmp_path, text)) == expected


def test_a_limit_leaves_later_lines_unread(tmp_path: Path) -> None:
    path = written(tmp_path, HEADER + "0,1,1\n1,2,2\nnonsense\n")
    assert [a.prompt_tokens for a in read_trace(path, limit=2)] == [1, 2]
    with pytest.raises(ValueError, match="at least 1, got 0"):
        read_trace(path, limit=0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            HEADER + "0,1,1\n1,0,1\n",
            "line 3: prompt_tokens must be a whole number from 1 on, got 0",
        ),
        (HEADER + "0,1,-4\n", "line 2: output_tokens must be .* got -4"),
        (HEADER + "0,1.5,4\n", "line 2: prompt_tokens must be a whole number .* got 1.5"),
        (HEADER + "0,many,4\n", "line 2: prompt_tokens must be .* got 'many'"),
        (HEADER + "soon,1,4\n", "line 2: arrival_s must be seconds from 0 on, got 'soon'"),
        (HEADER + "nan,1,4\n", "line 2: arrival_s must be seconds from 0 on, got nan"),
        (HEADER + "-1,1,4\n", "line 2: arrival_s must be seconds from 0 on, got -1"),
        (HEADER + "0,1\n", "line 2: expected 3 values, got 2"),
        (HEADER + "5,1,1\n\n4,1,1\n", "line 4: arrival_s 4 is before 5; sort the trace"),
        ("arrival_s,prompt\n0,1\n", "line 1: missing prompt_tokens, output_tokens"),
        (row() + "\n{oops\n", "line 2: not valid JSON: .* at column 2"),
        (row() + "\n7\n", "line 2: expected a JSON object, got 7"),
        (row(output_tokens=None), "line 1: missing output_tokens"),
        (row(prompt_tokens=True), "line 1: prompt_tokens must be .* got True"),
        (row(arrival_s="1"), "line 1: arrival_s must be seconds from 0 on, got '1'"),
        (row(arrival_s=10**400), "line 1: arrival_s must be seconds"),
        (row(hash_ids=[1, -1]), r"line 1: hash_ids must be a list .* got \[1, -1\]"),
        (row(hash_ids=3), "line 1: hash_ids must be a list .* got 3"),
        (row(hash_block=0), "line 1: hash_block must be .* got 0"),
        (row() + '\n{"arrival_s": ' + "[" * 100_000, "line 2: JSON that is nested too deeply"),
        (row(prompt_tokens=10**30), "line 1: prompt_tokens must be at most 1,000,000,000,000"),
        (HEADER + "0," + "x" * 200_000 + ",4\n", "line 2: prompt_tokens must be .{100,200}$"),
        ("\n\n", "has no request"),
        (HEADER, "has no request"),
    ],
)
def test_a_bad_line_is_named_with_its_number_and_reason(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(TraceError, match=message):
        read_trace(written(tmp_path, text))


def test_unreadable_files_are_trace_errors_that_name_the_file(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x01" * 8)
    for name, message in [("none", "No such file"), (".", "directory"), ("binary", "not a text")]:
        with pytest.raises(TraceError, match=message) as caught:
            read_trace(tmp_path / name)
        assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_synthetic_workloads_are_seeded_start_at_zero_and_extend_shorter_ones(kind: str) -> None:
    long = synthetic(kind, 200, seed=7)
    assert long[:20] == synthetic(kind, 20, seed=7) != synthetic(kind, 20, seed=8)
    times = [a.arrival_s for a in long]
    assert times[0] == 0 and times == sorted(times) and times[-1] > 0


@pytest.mark.parametrize(
    ("kind", "prompt", "output", "rate"),
    [
        ("chat", (1020, 2734, 4142, 14050), (129, 424, 601, 1000), 19366 / (58 * 60)),
        ("code", (1469, 5186, 7436, 7437), (13, 55, 249, 1899), 8819 / (57 * 60)),
        ("rag", (6909, 27367, 85399, 126195), (350, 597, 1115, 2000), 8618 / 2616),
    ],
)
def test_synthetic_demands_have_the_percentiles_of_their_trace(
    kind: str, prompt: tuple[int, ...], output: tuple[int, ...], rate: float
) -> None:
    demand = synthetic(kind, 20000, seed=1)
    for field, expected in (("prompt_tokens", prompt), ("output_tokens", output)):
        found = np.percentile([getattr(a, field) for a in demand], (50, 90, 99, 100))
        assert found == pytest.approx(expected, rel=0.08)
    assert len(demand) / demand[-1].arrival_s == pytest.approx(rate, rel=0.05)


def hit_ratio(demand: list[Arrival]) -> float:
    """Share of prefix blocks that an unbounded cache would contain."""
    seen: set[int] = set()
    hits = 0
    for arrival in demand:
        fresh = [i for i, prefix in enumerate(arrival.prefix_ids) if prefix not in seen]
        hits += fresh[0] if fresh else len(arrival.prefix_ids)
        seen.update(arrival.prefix_ids)
    return hits / sum(len(a.prefix_ids) for a in demand)


def test_a_third_of_the_rag_blocks_was_seen_before_as_in_its_trace() -> None:
    demand = synthetic("rag", 3000)
    assert hit_ratio(demand) == pytest.approx(0.35, abs=0.05)
    assert all(len(a.prefix_ids) == -(-a.prompt_tokens // a.hash_block) for a in demand)
    assert {a.prefix_ids[0] for a in demand} == {0}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: synthetic("poem", 1), "unknown demand 'poem'; expected one of chat, code, rag"),
        (lambda: synthetic("chat", 0), "requests must be at least 1, got 0"),
        (lambda: synthetic("chat", 1, seed=-1), "seed must be at least 0, got -1"),
        (lambda: scaled(ONE, 0.0), "scale must be a positive number"),
        (lambda: scaled(ONE, -1.0), "scale must be a positive number"),
        (lambda: scaled(ONE, float("nan")), "scale must be a positive number"),
        (lambda: scaled(ONE, float("inf")), "scale must be a positive number"),
        (lambda: scaled(ONE, 1e300), r"at most 1,000,000,000,000 tokens, got 1 scaled by 1e\+300"),
        (lambda: fit_scale([], 1), "context must be at least 2"),
        (lambda: prompts([], 0), "vocab_size >= 1 and seed >= 0"),
        (lambda: prompts([], 5, -1), "vocab_size >= 1 and seed >= 0"),
    ],
)
def test_bad_arguments_are_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@given(st.lists(arrivals(), min_size=1, max_size=4), st.floats(1e-4, 4))
def test_scaling_keeps_lengths_positive_and_prompts_covered(
    demand: list[Arrival], scale: float
) -> None:
    for before, after in zip(demand, scaled(demand, scale), strict=True):
        assert after.prompt_tokens >= 1 and after.output_tokens >= 1 and after.hash_block >= 1
        assert after.prompt_tokens <= before.prompt_tokens * scale + 1
        assert after.prefix_ids == before.prefix_ids[: len(after.prefix_ids)]
        covered = len(before.prefix_ids) * before.hash_block >= before.prompt_tokens
        if covered:
            assert len(after.prefix_ids) * after.hash_block >= after.prompt_tokens


def test_scaling_rounds_up_and_leaves_whole_results_whole() -> None:
    demand = [Arrival(3.0, 6758, 500, tuple(range(14)), 512)]
    assert scaled(demand, 1 / 16) == [Arrival(3.0, 423, 32, tuple(range(14)), 32)]
    assert scaled([Arrival(0.0, 30, 70)], 0.1)[0].prompt_tokens == 3
    assert scaled(demand, 1.0) == demand


@given(st.lists(arrivals(), max_size=4), st.integers(2, 8000))
def test_a_fitted_demand_fits_and_the_next_larger_scale_would_not(
    demand: list[Arrival], context: int
) -> None:
    scale = fit_scale(demand, context)
    assert all(a.prompt_tokens + a.output_tokens <= context for a in fit(demand, context))
    if scale < 1:
        larger = scaled(demand, scale * 2)
        assert any(a.prompt_tokens + a.output_tokens > context for a in larger)


@given(st.lists(arrivals(), max_size=4), st.integers(1, 1000), st.integers(0, 3))
def test_prompts_have_their_length_and_stay_within_the_vocabulary(
    demand: list[Arrival], vocab_size: int, seed: int
) -> None:
    found = prompts(demand, vocab_size, seed)
    assert [len(p) for p in found] == [a.prompt_tokens for a in demand]
    assert all(0 <= token < vocab_size for p in found for token in p)
    assert found == prompts(demand, vocab_size, seed)


def test_prompts_share_exactly_the_tokens_of_their_common_ids() -> None:
    demand = [
        Arrival(0.0, 100, 1, (7, 8, 9, 10), 32),
        Arrival(0.0, 90, 1, (7, 8, 11), 32),
        Arrival(0.0, 50, 1, (7, 8), 32),
    ]
    first, second, third = prompts(demand, 50000, seed=3)
    assert first != prompts(demand, 50000, seed=4)[0]
    assert first[:64] == second[:64]
    assert first[64:70] != second[64:70]
    assert third == first[:50]
    alone = [Arrival(0.0, 64, 1, (7,), 32)] * 2
    first, second = prompts(alone, 50000)
    assert first[:32] == second[:32] and first[32:] != second[32:]


def test_an_id_of_more_tokens_than_any_prompt_draws_no_more_than_the_longest() -> None:
    huge = [Arrival(0.0, 40, 1, (7,), 10**12), Arrival(0.0, 30, 1, (7,), 10**12)]
    fitting = [replace(arrival, hash_block=40) for arrival in huge]
    assert prompts(huge, 50000) == prompts(fitting, 50000)


@with_traces
def test_the_public_traces_are_read_whole() -> None:
    counts = {
        "azure2023_conv.csv": 19366,
        "azure2023_code.csv": 8819,
        "mooncake_conversation_head.jsonl": 8618,
        "mooncake_conversation_tiny.jsonl": 400,
    }
    for name, count in counts.items():
        assert len(read_trace(TRACES / name)) == count


@with_traces
def test_scaling_the_mooncake_head_by_a_sixteenth_gives_the_tiny_file() -> None:
    head = read_trace(TRACES / "mooncake_conversation_head.jsonl", limit=400)
    assert scaled(head, 1 / 16) == read_trace(TRACES / "mooncake_conversation_tiny.jsonl")
