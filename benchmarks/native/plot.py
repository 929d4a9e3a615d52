"""Bars of ratios, grouped, a panel for each dtype: a PNG (needs the extra ``plot``)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

Groups = Mapping[str, Mapping[str, float]]
"""Ratios by kernel, for each label."""


def bars(path: Path, title: str, panels: Mapping[str, Groups]) -> None:
    """Writes a panel of groups of bars for each name; a line at 1 is the read-only pass."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure, grid = pyplot.subplots(
        rows, columns, figsize=(8 * columns, 3.2 * rows), sharey=True, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    figure.suptitle(title)
    for axes, (name, groups) in zip(grid.flat, panels.items(), strict=False):
        panel(axes, name, groups)
    for axes in grid.flat[len(panels) :]:
        axes.remove()
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=6)
    figure.savefig(path, dpi=100)


def panel(axes, name: str, groups: Groups) -> None:
    """A bar per kernel in each group."""
    kernels = [kernel for kernel in next(iter(groups.values())) if kernel != "read"]
    width = 0.85 / len(kernels)
    for place, kernel in enumerate(kernels):
        at = [group + place * width for group in range(len(groups))]
        axes.bar(at, [ratios[kernel] for ratios in groups.values()], width, label=kernel)
    centre = 0.425 - width / 2
    axes.set_xticks([group + centre for group in range(len(groups))], list(groups), fontsize=7)
    axes.axhline(1, color="gray", linestyle="--")
    axes.set_title(name)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
