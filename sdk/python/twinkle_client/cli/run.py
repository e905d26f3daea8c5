"""`twinkle run`: one training run, its metrics and its rollouts."""

import json
import math
from functools import partial
from typing import Annotated

import typer

from twinkle.api.gateway.v1.catalogue_service_pb2 import Run
from twinkle_client.cli.curves import curve
from twinkle_client.cli.rollouts import rollouts
from twinkle_client.cli.runs import NAME_LABEL, run_as_json
from twinkle_client.cli.session import StateDirOption, console, error_console, open_client
from twinkle_client.cli.times import local_text
from twinkle_client.metrics import MetricSeries, RunMetrics

_WIDTH, _HEIGHT = 60, 6
_POINTS = 2 * _WIDTH

app = typer.Typer(help='Show a training run, its metrics and its rollouts.', no_args_is_help=True)
app.command('rollouts')(rollouts)


@app.command('show')
def show(
    run: Annotated[str, typer.Argument(help='Run id, as printed by `twinkle runs`.')],
    metric: Annotated[list[str] | None, typer.Option(help='Metric to show; repeat for several. Default: all.')] = None,
    is_json: Annotated[
        bool, typer.Option('--json', help='Print JSON, with up to 10,000 points of each metric.')
    ] = False,
    state_dir: StateDirOption = None,
) -> None:
    """Show a run with the curves of its metrics."""
    with open_client(state_dir) as client, error_console.status('loading the run'):
        found = client.get_training_run(run)
        series = RunMetrics(run, client=client).get(metric or (), max_points=10_000 if is_json else _POINTS)
    if is_json:
        typer.echo(json.dumps(_as_json(found, series)))
        return
    state = 'active' if found.is_active else 'ended'
    facts = f'{found.base_model}, rank {found.lora_rank}' if found.lora_rank else found.base_model
    name = f'{run} {found.user_metadata.get(NAME_LABEL, "")}'.strip()
    line = f'{name}: {facts}, {found.step_count} steps, version {found.version}, {state}'
    console.print(f'{line}, {local_text(found.create_time)}', markup=False, highlight=False, soft_wrap=True)
    tags = [f'{label}={value}' for label, value in sorted(found.user_metadata.items()) if label != NAME_LABEL]
    if tags:
        console.print(', '.join(tags), markup=False, highlight=False, soft_wrap=True)
    for name, one in series.items():
        _print_curve(name, one)
    for name in metric or ():
        if name not in series:
            error_console.print(f'the run has no metric {name!r}', markup=False, highlight=False)
    if not series and not metric:
        error_console.print('no metrics yet; programs log them with RunMetrics(run).log({...}, step=...)', markup=False)


def _print_curve(name: str, series: MetricSeries) -> None:
    """Print a metric: its last value, its curve, and the range of its values and steps."""
    finite = [value for value in series.values if math.isfinite(value)]
    labels = [''] * _HEIGHT
    if finite:
        labels[0], labels[-1] = f'{max(finite):.4g}', f'{min(finite):.4g}'
    margin = max(map(len, (*labels, 'step')))
    width = max(min(_WIDTH, console.width - margin - 2), 8)
    print_plain = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    print_plain(f'{name}: {series.values[-1]:.6g} at step {series.steps[-1]}')
    for label, line in zip(labels, curve(series.steps, series.values, width=width, height=_HEIGHT), strict=True):
        print_plain(f'{label:>{margin}} {line}')
    first, last = str(series.steps[0]), str(series.steps[-1])
    print_plain(f'{"step":>{margin}} {first}' + ('' if first == last else f' {last:>{max(width - len(first) - 1, 0)}}'))


def _as_json(run: Run, series: dict[str, MetricSeries]) -> dict[str, object]:
    """Return a run and its metrics for JSON, in which numbers that are not finite are text."""
    return {
        **run_as_json(run),
        'metrics': {
            name: {
                'steps': list(one.steps),
                'values': [value if math.isfinite(value) else str(value) for value in one.values],
                'times': [time.isoformat() for time in one.times],
                'point_count': one.point_count,
            }
            for name, one in series.items()
        },
    }
