"""Bars of ratios, grouped: a PNG (needs the extra ``plot``)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def bars(path: Path, title: str, groups: Mapping[str, Mapping[str, float]]) -> None:
    """Writes a bar for each form in each group; ``groups`` maps a label to ratios by form."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    forms = list(dict.fromkeys(name for ratios in groups.values() for name in ratios))
    forms.remove("read")  # the line at 1
    figure, axes = pyplot.subplots(figsize=(1.6 * len(groups) + 2, 4.5), layout="constrained")
    width = 0.8 / len(forms)
    for place, form in enumerate(forms):
        at = [group + place * width for group in range(len(groups))]
        axes.bar(at, [ratios.get(form, 0) for ratios in groups.values()], width, label=form)
    axes.set_xticks([group + 0.4 - width / 2 for group in range(len(groups))], list(groups))
    axes.axhline(1, color="gray", linestyle="--")
    axes.set_title(title)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
