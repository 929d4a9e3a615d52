"""Matplotlib figures as SVG, in the colours of the page's style sheet and with tooltips."""

from __future__ import annotations

import html
import io
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from graphs.report.tables import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["COLOURS", "as_svg", "drawing", "style"]

# Placeholders, replaced by CSS variables as light and dark pages differ.
_NAMES = ("text", "muted", "grid", "card", "accent", "soft", "second", "third", "fourth", "edge")
COLOURS = {
    name: f"#fe00{place:02x}" for place, name in enumerate((*_NAMES, "w0", "w1", "w2", "w3", "w4"))
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
    **dict.fromkeys(("axes.edgecolor", "grid.color"), COLOURS["grid"]),
    **dict.fromkeys(("text.color", "axes.labelcolor"), COLOURS["text"]),
    **dict.fromkeys(("xtick.color", "ytick.color"), COLOURS["muted"]),
}


def style() -> AbstractContextManager[None]:
    """Context manager that sets matplotlib's options for the page."""
    from matplotlib import rc_context

    context: AbstractContextManager[None] = rc_context(_STYLE)
    return context


def drawing(inches: float, x: str = "linear", y: str = "linear") -> tuple[Figure, Axes]:
    """A figure of the page's width with one pair of axes.

    Args:
        inches: height.
        x, y: scale of the axis: ``linear``, ``log``, or ``sizes`` (powers of two, and 0).
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    figure = Figure((9, inches), layout="constrained")
    axes = figure.subplots()
    scales = {"sizes": ("symlog", {"base": 2, "linthresh": 1})}
    for axis, set_scale, kind in (
        (axes.xaxis, axes.set_xscale, x),
        (axes.yaxis, axes.set_yscale, y),
    ):
        name, options = scales.get(kind, (kind, {}))
        set_scale(name, **options)
        axis.set_major_formatter(FuncFormatter(lambda value, _: number(round(value, 9))))
    return figure, axes


def as_svg(figure: Figure, label: str, tooltips: Mapping[str, str] | None = None) -> str:
    """Render a figure as an ``<svg>`` element, with a legend.

    Args:
        figure: has one pair of axes.
        label: description for screen readers.
        tooltips: by ``gid`` of the element.
    """
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
    for name, colour in COLOURS.items():
        svg = svg.replace(colour, f"var(--{name})")
    return named + svg
