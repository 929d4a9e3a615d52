"""The charts: what they draw and tell."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("matplotlib", reason="needs the extra report")

from graphs.report.charts import charts, legend_entry, widest_axes
from graphs.report.rows import BucketRow, bucket_rows, short_names


def rows(*given):
    return bucket_rows({"buckets": list(given)})


def chart_of(title, *given):
    """The chart of that title of these buckets, or None."""
    return next((chart for chart in charts({}, rows(*given)) if chart.title == title), None)


def tooltips(svg):
    return set(re.findall(r"<title>(.*?)</title>", svg, re.DOTALL))


def texts(svg):
    return re.findall(r"<text[^>]*>(.*?)</text>", svg)


def width_of(svg, tooltip):
    """The width of the mark with that tooltip, from the corners of its outline."""
    outline = re.search(rf"<title>{re.escape(tooltip)}</title>.*? d=\"(.*?)\"", svg, re.DOTALL)[1]
    across = [float(x) for x in re.findall(r"-?[\d.]+", outline)[::2]]
    return max(across) - min(across)


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


def test_the_plane_distinguishes_hits_waste_never_hit_and_failed():
    found = chart_of(
        "Buckets",
        {"bucket": "a=1 b=1", "hits": 100, "waste": 0.05},
        {"bucket": "a=2 b=1", "hits": 25, "waste": 0.9},
        {"bucket": "a=4 b=1", "hits": 0},
        {"bucket": "a=1 b=2", "status": "failed", "error": "boom"},
    )
    often, seldom = "a=1 b=1: 100 hits, 5% padding", "a=2 b=1: 25 hits, 90% padding"
    assert tooltips(found.svg) == {often, seldom, "a=4 b=1: never hit", "a=1 b=2: failed, boom"}
    legend = ["padding under 10 %", "padding above", "never hit", "not captured"]
    assert [text for text in texts(found.svg) if text in legend] == legend
    assert found.lead.startswith("3 captured, 1 of them never hit, 1 not captured.")
    # Areas, less that of a mark without hits, are as 4 to 1.
    areas = [width_of(found.svg, mark) ** 2 for mark in (often, seldom, "a=4 b=1: never hit")]
    assert (areas[0] - areas[2]) / (areas[1] - areas[2]) == pytest.approx(4, rel=1e-3)


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        ([{"waste": 0.8, "hits": 30}, {"waste": 0.0, "hits": 10}], "padding to 75 %"),  # the mean
        ([{"waste": 0.05, "hits": 3}], "padding under 10 %"),
        ([{"waste": 0.75, "hits": 3}], "padding above"),
        ([{"hits": 0}, {"status": "failed"}], "never hit"),
        ([{"status": "failed"}], "not captured"),
        ([{"hits": 2}], "hit"),
        ([{}], "hit"),
    ],
)
def test_a_mark_looks_like_what_its_buckets_went_through(group, expected):
    assert legend_entry(rows(*({"bucket": "a=1", **each} for each in group))) == expected


def test_buckets_at_one_place_share_a_mark():
    places = [("a=1 b=1 c=0", 30), ("a=1 b=1 c=8", 10), ("a=2 b=4 c=8", 0), ("a=4 b=2 c=8", 0)]
    found = chart_of("Buckets", *({"bucket": name, "hits": hits} for name, hits in places))
    assert "a=1 b=1 c=0: 30 hits\na=1 b=1 c=8: 10 hits" in tooltips(found.svg)
    assert len(tooltips(found.svg)) == 3


def test_one_axis_is_a_line_and_no_sizes_are_no_plane():
    found = chart_of("Buckets", {"bucket": "rows=1", "hits": 1}, {"bucket": "rows=8", "hits": 2})
    assert "rows" in texts(found.svg) and found.svg.count("ytick_") == 0
    assert chart_of("Buckets", {"bucket": "large"}) is None


def timed(name, steps, p50, p99, most):
    return {"bucket": name, "steps": steps, "step_ms": {"p50": p50, "p99": p99, "max": most}}


def test_step_times_are_sorted_by_use_and_leave_out_what_never_ran():
    found = chart_of(
        "Step times", timed("a=1", 2, 1, 2, 4), timed("a=2", 5, 2, 3, 5), timed("a=3", 0, 0, 0, 0)
    )
    shown = texts(found.svg)
    assert [text for text in shown if text.startswith("a=")] == ["a=2", "a=1"]
    assert [text for text in shown if text.endswith("steps")] == ["2 ms, 5 steps", "1 ms, 2 steps"]
    assert {"0", "1", "5"} <= set(shown), "a linear axis begins at 0"
    assert chart_of("Step times", {"bucket": "a=1", "hits": 3}) is None


def test_of_many_bars_the_most_used_are_shown():
    found = chart_of("Step times", *(timed(f"a={i}", i, 1, 2, 4) for i in range(1, 40)))
    names = [text for text in texts(found.svg) if text.startswith("a=")]
    assert names == [f"a={i}" for i in range(39, 15, -1)]
    assert "The first 24 of 39; the table below has all." in found.lead


def test_step_times_far_apart_are_on_a_logarithmic_axis():
    found = chart_of("Step times", timed("a=1", 2, 1, 2, 4), timed("a=2", 5, 200, 300, 500))
    assert {"1", "10", "100"} <= set(texts(found.svg)) and "0" not in texts(found.svg)


def chart(**changes):
    x = [0.0, 5.0, 10.0]
    lines = {"in use": [0, 50, 100], "highest": [10, 60, 100]}
    return {"title": "Blocks", "x": x, "lines": lines, **changes}


def test_a_series_has_its_lines_and_a_limit_on_common_axes():
    (found,) = charts({"series": [chart(limit=100, x_label="s", y_label="blocks")]}, [])
    shown = texts(found.svg)
    assert {"in use, peak 100", "highest, peak 100", "limit 100", "s", "blocks"} <= set(shown)
    assert found.title == "Blocks" and found.lead == ""
    assert charts({"series": [chart(x=[])]}, []) == charts({}, []) == []


def test_a_limit_far_above_the_lines_is_shown_and_not_drawn():
    (found,) = charts({"series": [chart(limit=2048)]}, [])
    assert found.lead == "The limit, 2,048, is above the chart."
    assert "limit 2,048" not in texts(found.svg) and "100" in texts(found.svg)


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
        charts({"series": [chart(**changes)]}, [])


def test_colours_are_those_of_the_page_and_text_stays_text():
    evil = '<b>$x$ & "y" a=1'
    found = chart_of("Buckets", {"bucket": evil, "hits": 3})
    assert "#fe00" not in found.svg and "var(--accent)" in found.svg
    assert "<b>" not in found.svg and "&lt;b&gt;$x$ &amp;" in found.svg
