"""Plots of the numbers that recipes record."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

PANEL_INCHES = (4.2, 3.0)


def plot_curves(steps: Sequence[Mapping[str, float]], names: Sequence[str], *, title: str, path: Path) -> None:
    """Plot each of `names` over the steps, one panel each, and save the plot as a PNG."""
    plot_runs({'': steps}, names, title=title, path=path)


def plot_runs(
    runs: Mapping[str, Sequence[Mapping[str, float]]], names: Sequence[str], *, title: str, path: Path
) -> None:
    """Plot several runs in the same panels.

    Args:
        runs: Steps of each run by label, such as its seed. A step may lack some of the numbers.
        names: Names of the numbers to plot, one panel each.
        title: Title of the plot.
        path: Path of the PNG.
    """
    width, height = PANEL_INCHES
    figure = Figure(figsize=(width * len(names), height))
    axes = figure.subplots(1, len(names), squeeze=False)
    for axis, name in zip(axes[0], names, strict=True):
        for label, steps in runs.items():
            points = [(step['step'], step[name]) for step in steps if name in step]
            axis.plot(*zip(*points, strict=True), label=label, marker='.' if len(points) < 40 else '')
        axis.set_xlabel('step')
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.set_title(name)
        axis.grid(alpha=0.3)
    if len(runs) > 1:
        axes[0][0].legend()
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
