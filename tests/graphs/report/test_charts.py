"""What the charts show, before a template draws it."""

from __future__ import annotations

import numpy as np
import pytest

from graphs.report.bars import step_times, warmup_seconds
from graphs.report.plane import plane, widest_axes
from graphs.report.rows import BucketRow, bucket_rows, short_names
from graphs.report.series import series_charts, thinned


def rows(*given):
    return bucket_rows({"buckets": list(given)})


def test_a_row_takes_its_sizes_from_its_name_or_from_sizes():
    first, second = rows(
        {"bucket": "tokens=4 blocks=16", "steps": 3},
        {"bucket": "large", "sizes": {"tokens": 8}, "hits": 2, "waste": 0.5},
    )
    assert (first.sizes, first.hits, first.waste) == ({"tokens": 4, "blocks": 16}, 3, None)
    assert (second.sizes, second.hits, second.waste) == ({"tokens": 8}, 2, 0.5)


@pytest.mark.parametrize("buckets", [None, "text", 3, [], [1, {"no": "name"}]])
def test_what_is_no_list_of_buckets_has_no_rows(buckets):
    assert bucket_rows({"buckets": buckets}) == []


def test_names_leave_out_the_axes_that_all_have_in_common():
    found = short_names(rows({"bucket": "a=1 b=2 c=9"}, {"bucket": "a=4 b=2 c=8"}))
    assert found == {"a=1 b=2 c=9": "a=1 c=9", "a=4 b=2 c=8": "a=4 c=8"}
    assert short_names(rows({"bucket": "a=1"})) == {"a=1": "a=1"}


def test_the_widest_axes_have_the_most_sizes_and_a_constant_one_is_none():
    grid = [BucketRow("", {"a": 1, "b": b, "c": c}) for b in (1, 2) for c in (8, 16, 32)]
    assert widest_axes(grid) == ["c", "b"]
    assert widest_axes([BucketRow("", {"a": 1, "b": 2})]) == ["b"]
    assert widest_axes([]) == []


def test_the_plane_tells_hits_waste_never_hit_and_lost_apart():
    found = plane(
        rows(
            {"bucket": "a=1 b=1", "hits": 100, "waste": 0.05},
            {"bucket": "a=2 b=1", "hits": 25, "waste": 0.9},
            {"bucket": "a=4 b=1", "hits": 0},
            {"bucket": "a=1 b=2", "status": "failed", "error": "boom"},
        )
    )
    marks = {mark.text: mark for mark in found["marks"]}
    assert {text: mark.kind for text, mark in marks.items()} == {
        "a=1 b=1: 100 hits, 5% padding": "w0",
        "a=2 b=1: 25 hits, 90% padding": "w4",
        "a=4 b=1: never hit": "never",
        "a=1 b=2: failed, boom": "lost",
    }
    assert (found["captured"], found["never_hit"], found["lost"]) == (3, 1, 1)
    often, seldom = marks["a=1 b=1: 100 hits, 5% padding"], marks["a=2 b=1: 25 hits, 90% padding"]
    assert (often.radius - 5) / (seldom.radius - 5) == pytest.approx(2)  # four times the area
    assert often.x < seldom.x and often.y > marks["a=1 b=2: failed, boom"].y


def test_buckets_at_one_place_share_a_mark_with_the_mean_waste():
    found = plane(
        rows(
            {"bucket": "a=1 b=1 c=0", "hits": 30, "waste": 0.8},
            {"bucket": "a=1 b=1 c=8", "hits": 10, "waste": 0.0},
            {"bucket": "a=2 b=4 c=8", "hits": 0},
            {"bucket": "a=4 b=2 c=8", "hits": 0},
        )
    )
    (shared,) = [mark for mark in found["marks"] if "\n" in mark.text]
    assert shared.kind == "w3"  # 60 %
    assert found["is_shared"] and len(found["marks"]) == 3


def test_one_axis_is_a_line_and_no_sizes_are_no_plane():
    found = plane(rows({"bucket": "rows=1", "hits": 1}, {"bucket": "rows=8", "hits": 2}))
    assert found["axes"] == ["rows"] and found["y"] is None
    assert {mark.y for mark in found["marks"]} == {50}
    assert {mark.kind for mark in found["marks"]} == {"hit"}
    assert plane(rows({"bucket": "large"})) is None


def test_warmup_bars_are_on_one_axis_with_the_cold_seconds():
    found = warmup_seconds(
        rows(
            {"bucket": "a=1", "warmup_seconds": 0.5, "cold_seconds": 4.0},
            {"bucket": "a=2", "warmup_seconds": 1.0, "cold_seconds": 5.0},
            {"bucket": "a=3", "warmup_seconds": 9.0, "status": "failed"},
        )
    )
    assert [bar["name"] for bar in found["shown"]] == ["a=2", "a=1"]
    assert [(bar["width"], bar["cold_width"]) for bar in found["shown"]] == [(20, 100), (10, 80)]
    assert (found["total"], found["cold_total"], found["has_cold"]) == ("1.5", "9", True)
    assert warmup_seconds(rows({"bucket": "a=1"})) is None


def test_many_bars_are_folded_away():
    found = warmup_seconds(rows(*({"bucket": f"a={i}", "warmup_seconds": i} for i in range(1, 40))))
    assert len(found["shown"]) == 24 and len(found["folded"]) == 15
    assert found["shown"][0]["name"] == "a=39" and found["folded"][-1]["name"] == "a=1"


def timed(name, steps, p50, p99, most):
    return {"bucket": name, "steps": steps, "step_ms": {"p50": p50, "p99": p99, "max": most}}


def test_step_times_are_sorted_by_use_and_leave_out_what_never_ran():
    found = step_times(
        rows(timed("a=1", 2, 1, 2, 4), timed("a=2", 5, 2, 3, 5), timed("a=3", 0, 0, 0, 0))
    )
    assert [row["name"] for row in found["shown"]] == ["a=2", "a=1"]
    assert not found["scale"].is_log
    first = found["shown"][0]
    assert (first["p50"], first["p99"], first["max"]) == (40, 60, 100)
    assert first["text"] == "a=2: 5 steps, p50 2 ms, p99 3 ms, max 5 ms"
    assert step_times(rows({"bucket": "a=1", "hits": 3})) is None


def test_step_times_far_apart_are_on_a_logarithmic_axis():
    found = step_times(rows(timed("a=1", 2, 1, 2, 4), timed("a=2", 5, 200, 300, 500)))
    assert found["scale"].is_log
    assert found["shown"][1]["p50"] == 0


def chart(**changes):
    x = [0.0, 5.0, 10.0]
    lines = {"in use": [0, 50, 100], "highest": [10, 60, 100]}
    return {"title": "Blocks", "x": x, "lines": lines, **changes}


def test_a_series_has_its_lines_on_common_axes():
    (found,) = series_charts({"series": [chart(limit=100, x_label="s")]})
    assert [line["path"] for line in found["lines"]] == ["0,100 50,50 100,0", "0,90 50,40 100,0"]
    assert [line["peak"] for line in found["lines"]] == ["100", "100"]
    assert (found["limit"], found["limit_at"]) == ("100", 0)
    assert found["columns"][-1]["text"] == "5 s\nin use 50\nhighest 60"
    assert series_charts({"series": [chart(x=[])]}) == series_charts({}) == []


def test_a_limit_far_above_the_lines_is_told_and_not_drawn():
    (found,) = series_charts({"series": [chart(limit=2048)]})
    assert (found["limit"], found["limit_at"]) == ("2,048", None)
    assert found["y"].high == 100


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lines": {"a": [1, 2]}}, "expected lines of 3 values, got a has 2"),
        ({"lines": {}}, "got no line"),
        ({"lines": {str(i): [1, 2, 3] for i in range(5)}}, "at most 4 lines, got 5"),
    ],
)
def test_a_series_that_does_not_fit_is_an_error_with_its_title(changes, message):
    with pytest.raises(ValueError, match=f"series 'Blocks': .*{message}"):
        series_charts({"series": [chart(**changes)]})


def test_thinning_keeps_every_peak_and_both_ends():
    x = np.arange(10_000.0)
    y = np.sin(x)
    y[1234], y[7777] = 50, -50
    thin_x, thin_y = thinned(x, y, 100)
    assert len(thin_x) <= 202 and (np.diff(thin_x) > 0).all()
    assert {1234.0, 7777.0, 0.0, 9999.0} <= set(thin_x.tolist())
    assert thin_y.max() == 50 and thin_y.min() == -50
    same_x, same_y = thinned(x[:150], y[:150], 100)
    assert same_x.tolist() == x[:150].tolist() and same_y.tolist() == y[:150].tolist()
