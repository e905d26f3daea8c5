"""Curves that are drawn again as values are stored, for `twinkle run show --follow`."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial

from rich.live import Live
from rich.text import Text

from twinkle_client.cli.curves import LINES, POINTS, curve_lines
from twinkle_client.cli.session import console, error_console
from twinkle_client.errors import RetryableError
from twinkle_client.metrics import MetricSeries, MetricUpdate, RunMetrics

_FIRST = ('train/loss', 'loss')
"""Metrics that are drawn first."""
print_plain = partial(console.print, markup=False, highlight=False, soft_wrap=True)


def follow(metrics: RunMetrics, names: Sequence[str]) -> None:
    """Draw the curves of a run again after each change, until an interrupt.

    Without a terminal, each value is printed on a separate line, and the stored part of a long curve is reduced. If
    the connection is lost, this function reconnects without a time limit.

    Args:
        metrics: Metrics of the run.
        names: Metrics to draw. Empty: all.

    Raises:
        Error: The metrics cannot be read, or the run is no longer listed.
    """
    curves: dict[str, MetricSeries] = {}
    with Live(console=console, auto_refresh=False) if console.is_terminal else nullcontext() as screen:
        for update in _updates(metrics, names):
            if screen is None:
                _print_values(update, known=curves)
            curves = update.applied_to(curves)
            if screen is not None:
                screen.update(_picture(curves), refresh=True)


def _updates(metrics: RunMetrics, names: Sequence[str]) -> Iterator[MetricUpdate]:
    has_begun = False
    while True:
        try:
            for update in metrics.watch(names, max_points=POINTS):
                has_begun = True
                yield update
        except RetryableError:
            if not has_begun:
                raise
            error_console.print('the server does not respond; retrying until Ctrl-C', markup=False)


def _picture(curves: dict[str, MetricSeries]) -> Text:
    """Return as many curves as fit on the terminal."""
    if not curves:
        return Text('no metrics yet')
    names = sorted(curves, key=lambda name: (_FIRST.index(name) if name in _FIRST else len(_FIRST), name))
    shown = names[: max((console.height - 1) // LINES, 1)]
    lines = [line for name in shown for line in curve_lines(name, curves[name], width=console.width)]
    if len(shown) < len(names):
        lines.append(f'{len(names) - len(shown)} more metrics do not fit; select some with --metric')
    return Text('\n'.join(lines), no_wrap=True, overflow='crop')


def _print_values(update: MetricUpdate, *, known: Mapping[str, MetricSeries]) -> None:
    """Print the values that were stored after all known values. A snapshot repeats values that were printed before."""
    newest = max((time for series in known.values() for time in series.times), default=None)
    points = [
        (step, name, value)
        for name, series in update.series.items()
        for step, value, time in zip(series.steps, series.values, series.times, strict=True)
        if newest is None or time > newest
    ]
    for step, name, value in sorted(points, key=lambda point: point[:2]):
        print_plain(f'{step} {name} {value:.6g}')
