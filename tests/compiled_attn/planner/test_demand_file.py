"""Demand files: what is written is read, bad lines are named."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled_attn.errors import DemandFileError
from compiled_attn.planner import Demand, plan, read_demand
from graphs import from_file, to_file
from graphs.buckets.recorded import RecordedSizes
from tests.compiled_attn.planner.brute import figures

NAMES = ("a", "b")
counts = st.integers(1, 10**6) | st.floats(1e-6, 1.0)
rows = st.lists(st.tuples(st.integers(0, 10**12), st.integers(0, 9), counts), min_size=1)


def as_json(rows):
    lines = ({"need": {"a": a, "b": b}, "count": count} for a, b, count in rows)
    return "".join(json.dumps(line) + "\n" for line in lines)


@settings(deadline=None, max_examples=60)
@given(rows)
def test_every_size_and_count_of_a_line_is_read(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("demand") / "demand"
    path.write_text(as_json(rows))
    assert read_demand(path) == Demand(NAMES, [row[:2] for row in rows], [row[2] for row in rows])


def test_bare_sizes_as_the_engine_records_them_are_read(tmp_path):
    (tmp_path / "steps").write_text('{"tokens": 3, "shared": 0}\n\n{"shared": 4, "tokens": 1}\n')
    assert read_demand(tmp_path / "steps") == Demand(("tokens", "shared"), [(3, 0), (1, 4)])


def test_a_plan_is_the_same_after_its_demand_and_its_buckets_went_through_files(tmp_path):
    demand = Demand(NAMES, [(i, i * j % 17) for i in range(1, 20) for j in range(1, 6)])
    (tmp_path / "demand").write_text(as_json([(*row, 1) for row in demand.points.tolist()]))
    report = plan(demand, budget=8)
    again = plan(read_demand(tmp_path / "demand"), budget=8)
    assert figures(again) == figures(report)
    to_file(report.space, tmp_path / "buckets.txt")
    space = from_file(tmp_path / "buckets.txt").with_cost(report.cost)
    assert list(space) == list(report.space)
    assert all(
        space.pick(a=a, b=b) == report.space.pick(a=a, b=b) for a, b in demand.points.tolist()
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no need; expected JSON lines"),
        ("a,b\n1,2\n", ":1: not valid JSON: "),
        ('{"need": {"a": 1}}\n{"need": {"b": 1}}\n', ":2: expected the axes a of the first need"),
        ('{"need": {"a": 1}}\n{oops\n', ":2: not valid JSON: "),
        ('{"need": 3}\n', ':1: expected an object with "need"'),
        ('{"need": {}}\n', ':1: expected an object with "need"'),
        ("{}\n", ":1: expected sizes by axis"),
        ('{"a": 1}\n[2]\n', ":2: expected sizes by axis"),
        ('{"a": 1.5}\n', ":1: a=1.5 is not a whole number"),
        ('{"a": true}\n', ":1: a=True is not a whole number"),
        ('{"a": -1}\n', ":1: a=-1 is negative"),
        ('{"need": {"a": 1}, "count": 0}\n', ":1: expected a positive count, got 0"),
        ('{"need": {"a": 1}, "count": "2"}\n', ":1: expected a positive count, got '2'"),
        ('{"a": 99999999999999999999}\n', ""),
    ],
)
def test_a_bad_file_is_refused_with_its_line(tmp_path, text, message):
    path = tmp_path / "demand"
    path.write_text(text)
    with pytest.raises(DemandFileError) as caught:
        read_demand(path)
    assert str(caught.value).startswith(str(path)) and message in str(caught.value)


def test_a_missing_or_binary_file_is_refused(tmp_path):
    with pytest.raises(DemandFileError, match="none: not readable as a demand"):
        read_demand(tmp_path / "none")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DemandFileError, match="bytes: not readable as a demand"):
        read_demand(tmp_path / "bytes")


def test_an_axis_may_be_called_count_where_its_sizes_stand_in_need(tmp_path):
    (tmp_path / "demand").write_text('{"need": {"count": 3}, "count": 2}\n')
    assert read_demand(tmp_path / "demand") == Demand(("count",), [[3]], [2])


def test_recorded_sizes_are_a_demand_whose_halves_are_older_and_newer(tmp_path):
    sizes = RecordedSizes(tmp_path / "sizes", ("rows", "length"), window=4)
    for rows in (3, 3, 5, 4, 6, 7, 7):
        sizes.add((rows, 2))
        if rows == 4:
            sizes.write()
    sizes.close()
    older, newer = read_demand(tmp_path / "sizes").halves()
    assert older == Demand(("rows", "length"), [[3, 2], [5, 2]], [2, 1])
    assert newer == Demand(("rows", "length"), [[4, 2], [6, 2], [7, 2]], [1, 1, 2])


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"a": ' + "[" * 100_000, "nested too deeply"),
        ('{"a": ' + "9" * 30 + "}", "a is beyond 64 bits"),
        ('{"' + "x" * 200_000 + '": 1.5}', "x" * 80),
        ("{" + ", ".join(f'"a{i}": 1' for i in range(20_000)) + "}", "one set of axes"),
    ],
    ids=["deep", "large", "long", "axes"],
)
def test_an_oversized_line_is_refused_with_its_number_in_a_short_message(tmp_path, line, reason):
    (tmp_path / "demand").write_text(f'{{"a": 1}}\n{line}\n')
    with pytest.raises(DemandFileError, match="demand:2: ") as caught:
        read_demand(tmp_path / "demand")
    assert len(str(caught.value)) < 600
    assert reason in str(caught.value)
