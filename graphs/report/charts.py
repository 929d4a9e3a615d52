"""Charts of a report, as SVG: buckets, step times, and values over time."""

from __future__ import annotations

import html
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from graphs.report.rows import BucketRow, short_names
from graphs.report.tables import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Chart", "charts"]

# Placeholders, replaced by CSS variables as light and dark pages differ.
_NAMES = ("text", "muted", "grid", "card", "accent", "soft", "second", "third", "fourth", "edge")
_COLOURS = {
    name: f"#fe00{index:02x}" for index, name in enumerate((*_NAMES, "w0", "w1", "w2", "w3", "w4"))
}
_STYLE: Any = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "legend.frameon": False,
    **dict.fromkeys(("axes.edgecolor", "grid.color"), _COLOURS["grid"]),
    **dict.fromkeys(("text.color", "axes.labelcolor"), _COLOURS["text"]),
    **dict.fromkeys(("xtick.color", "ytick.color"), _COLOURS["muted"]),
}
_MAX_BARS = 24
_LOG_RATIO = 20  # of the slowest to the fastest step time, above which the axis is logarithmic
_LIMIT_RATIO = 3  # of a limit to the highest value, above which drawing it would flatten the lines
_LINES = ("accent", "second", "third", "fourth")
_WASTE = {0.0: "under 10 %", 0.1: "to 25 %", 0.25: "to 50 %", 0.5: "to 75 %", 0.75: "above"}
_MARKS: dict[str, dict[str, Any]] = {
    **{
        f"padding {share}": {"color": _COLOURS[f"w{i}"], "edgecolor": _COLOURS["edge"]}
        for i, share in enumerate(_WASTE.values())
    },
    "hit": {"color": _COLOURS["accent"], "edgecolor": _COLOURS["card"]},
    "never hit": {"color": _COLOURS["card"], "edgecolor": _COLOURS["muted"], "linestyle": "--"},
    "not captured": {"color": _COLOURS["muted"], "marker": "x"},
}


class Chart(NamedTuple):
    """A chart as SVG, with a sentence on what it shows."""

    title: str
    lead: str
    svg: str


def charts(report: Mapping[str, Any], rows: Sequence[BucketRow]) -> list[Chart]:
    """All charts that a report has data for.

    Raises:
        ValueError: a series has no line, too many, or one of another length than its ``x``.
    """
    from matplotlib import rc_context

    with rc_context(_STYLE):
        found = [_plane(rows), _step_times(rows)]
        found += [_series(chart) for chart in report.get("series") or () if chart.get("x")]
    return [chart for chart in found if chart is not None]


def widest_axes(rows: Sequence[BucketRow]) -> list[str]:
    """The one or two axes with the most different sizes, in descending order."""
    sizes: dict[str, set[int]] = {}
    for row in rows:
        for axis, size in row.sizes.items():
            sizes.setdefault(axis, set()).add(size)
    ranked = sorted(sizes, key=lambda axis: (-len(sizes[axis]), -max(sizes[axis])))
    return [axis for axis in ranked[:2] if len(sizes[axis]) > 1] or ranked[:1]


def legend_entry(group: Sequence[BucketRow]) -> str:
    """The entry of the legend for the mark of these buckets."""
    if not any(row.is_captured for row in group):
        return "not captured"
    if any(row.hits is not None for row in group) and not _hits(group):
        return "never hit"
    known = [(row.waste, row.hits) for row in group if row.waste is not None and row.hits]
    if not known:
        return "hit"
    mean = sum(waste * hits for waste, hits in known) / sum(hits for _, hits in known)
    return f"padding {next(share for least, share in reversed(_WASTE.items()) if mean >= least)}"


def _plane(rows: Sequence[BucketRow]) -> Chart | None:
    """Buckets on their two widest axes; buckets with the same two sizes share a mark."""
    rows = [row for row in rows if row.sizes]
    if not rows:
        return None
    x, y = (*widest_axes(rows), "")[:2]
    at: dict[tuple[int, int], list[BucketRow]] = {}
    for row in rows:
        at.setdefault((row.sizes.get(x, 0), row.sizes.get(y, 0)), []).append(row)
    figure, plot = _drawing(4.2 if y else 1.6, "sizes", "sizes")
    most = max(map(_hits, at.values())) or 1
    tooltips: dict[str, str] = {}
    for point, group in sorted(at.items(), key=lambda item: -_hits(item[1])):  # small ones on top
        name = f"mark{len(tooltips)}"
        tooltips[name] = "\n".join(map(_tooltip, group))
        area = 40 + 460 * _hits(group) / most
        plot.scatter(*point, area, gid=name, **_MARKS[legend_entry(group)])
    for kind, style in _MARKS.items():
        if kind in map(legend_entry, at.values()):
            plot.scatter([], [], 60, label=kind, **style)
    plot.set(xlabel=x, ylabel=y)
    plot.yaxis.set_visible(bool(y))
    captured = [row for row in rows if row.is_captured]
    lead = (
        f"{len(captured)} captured, {sum(row.hits == 0 for row in captured)} of them never hit, "
        f"{len(rows) - len(captured)} not captured. The area of a mark shows how often it was hit; "
        "buckets that differ only on other axes share one."
    )
    return Chart("Buckets", lead, _as_svg(figure, f"Buckets by {x} {y}", tooltips))


def _step_times(rows: Sequence[BucketRow]) -> Chart | None:
    """Median, 99th percentile and maximum of each bucket, most used first."""
    known = [row for row in rows if row.hits and row.step_ms.get("p50", 0) > 0]
    known.sort(key=lambda row: -(row.hits or 0))
    if not known:
        return None
    lead, shown = "Time of a step by bucket, most used first.", known[:_MAX_BARS]
    if len(known) > len(shown):
        lead += f" The first {len(shown)} of {len(known)}; the table below has all."
    p50, p99, most = np.array([_percentiles(row) for row in shown]).T
    scale = "log" if most.max() > _LOG_RATIO * p50.min() else "linear"
    at = range(len(shown))
    figure, plot = _drawing(0.9 + 0.26 * len(shown), scale)
    plot.hlines(at, p99, most, _COLOURS["muted"], label="to the maximum")
    plot.plot(most, at, "|", color=_COLOURS["muted"])
    plot.hlines(at, p50, p99, _COLOURS["soft"], lw=6, label="to the 99th percentile")
    plot.plot(p50, at, "o", color=_COLOURS["accent"], label="median")
    if scale == "linear":
        plot.set_xlim(0, 1.05 * most.max())
    for index, row in enumerate(shown):
        text = f"{number(row.step_ms['p50'])} ms, {number(row.hits)} steps"
        plot.text(1.01, index, text, va="center", transform=plot.get_yaxis_transform())
    names = short_names(rows)
    plot.set_yticks(at, [names[row.name] for row in shown], family="monospace")
    plot.set(xlabel="milliseconds", ylim=(len(shown) - 0.5, -0.5))
    plot.grid(False, axis="y")
    return Chart("Step times", lead, _as_svg(figure, "Step times"))


def _series(chart: Mapping[str, Any]) -> Chart:
    """Lines over time, and their limit unless it is far above them."""
    title, x = str(chart.get("title", "")), np.asarray(chart["x"], np.float64)
    lines = {str(name): np.asarray(y, np.float64) for name, y in chart.get("lines", {}).items()}
    if not lines or any(line.shape != x.shape for line in lines.values()):
        shapes = ", ".join(f"{name} has {len(line)}" for name, line in lines.items()) or "no line"
        raise ValueError(f"series {title!r}: expected lines of {len(x)} values, got {shapes}")
    if len(lines) > len(_LINES):
        raise ValueError(
            f"series {title!r}: expected at most {len(_LINES)} lines, got {len(lines)}: make two"
        )
    figure, plot = _drawing(2.8)
    for (name, line), colour in zip(lines.items(), _LINES, strict=False):
        peak = number(float(line.max()))
        plot.plot(x, line, color=_COLOURS[colour], label=f"{name}, peak {peak}")
    plot.set(xlabel=str(chart.get("x_label", "")), ylabel=str(chart.get("y_label", "")))
    limit, highest = chart.get("limit"), max(float(line.max()) for line in lines.values())
    is_near = limit is not None and limit <= _LIMIT_RATIO * highest
    if limit is not None and is_near:
        plot.axhline(limit, color=_COLOURS["muted"], ls="--", label=f"limit {number(limit)}")
    plot.set_ylim(bottom=min(0.0, *plot.get_ylim()))
    lead = "" if limit is None or is_near else f"The limit, {number(limit)}, is above the chart."
    return Chart(title, lead, _as_svg(figure, title))


def _hits(group: Sequence[BucketRow]) -> int:
    return sum(row.hits or 0 for row in group)


def _percentiles(row: BucketRow) -> tuple[float, float, float]:
    p50 = row.step_ms["p50"]
    p99 = row.step_ms.get("p99", p50)
    return p50, p99, row.step_ms.get("max", p99)


def _tooltip(row: BucketRow) -> str:
    if not row.is_captured:
        return f"{row.name}: {row.status}" + (f", {row.error}" if row.error else "")
    parts = [] if row.hits is None else [f"{number(row.hits)} hits" if row.hits else "never hit"]
    if row.waste is not None and row.hits:
        parts.append(f"{row.waste:.0%} padding")
    return f"{row.name}: {', '.join(parts) or 'captured'}"


def _drawing(inches: float, x: str = "linear", y: str = "linear") -> tuple[Figure, Axes]:
    # Scales: `linear`, `log`, or `sizes` (powers of two, and 0).
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    figure = Figure((9, inches), layout="constrained")
    axes = figure.subplots()
    scales = {"sizes": ("symlog", {"base": 2, "linthresh": 1})}
    both = (axes.xaxis, axes.set_xscale, x), (axes.yaxis, axes.set_yscale, y)
    for axis, set_scale, kind in both:
        name, options = scales.get(kind, (kind, {}))
        set_scale(name, **options)
        axis.set_major_formatter(FuncFormatter(lambda value, _: number(round(value, 9))))
    return figure, axes


def _as_svg(figure: Figure, label: str, tooltips: Mapping[str, str] | None = None) -> str:
    """Render a figure, with a label for screen readers and tooltips by ``gid`` of an element."""
    (axes,) = figure.axes
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=6)
    file = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    named = f'<svg role="img" aria-label="{html.escape(label)}"'
    svg = file.getvalue().partition("<svg")[2]
    for name, text in (tooltips or {}).items():
        group = f'<g id="{name}">'
        svg = svg.replace(group, f"{group}<title>{html.escape(text)}</title>", 1)
    for name, colour in _COLOURS.items():
        svg = svg.replace(colour, f"var(--{name})")
    return named + svg
