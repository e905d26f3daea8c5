"""`twinkle run`: one training run, its metrics and its rollouts."""

import math
from typing import Annotated

import typer

from twinkle.api.gateway.v1.catalogue_service_pb2 import Run
from twinkle_client.cli.curves import POINTS, curve_lines
from twinkle_client.cli.following import follow, print_plain
from twinkle_client.cli.rollouts import rollouts
from twinkle_client.cli.runs import NAME_LABEL, run_as_json
from twinkle_client.cli.session import (
    StateDirOption,
    console,
    error_console,
    exit_on_interrupt,
    open_client,
    print_json,
)
from twinkle_client.cli.times import local_text
from twinkle_client.metrics import MetricSeries, RunMetrics

app = typer.Typer(help='Show a training run, its metrics and its rollouts.', no_args_is_help=True)
app.command('rollouts')(rollouts)


@app.command('show')
def show(
    run: Annotated[str, typer.Argument(help='Run id, as printed by `twinkle runs`.')],
    metric: Annotated[list[str] | None, typer.Option(help='Metric to show; repeat for several. Default: all.')] = None,
    is_json: Annotated[
        bool, typer.Option('--json', help='Print JSON, with up to 10,000 points of each metric.')
    ] = False,
    is_followed: Annotated[
        bool, typer.Option('--follow', help='Draw the curves again as values are stored, until Ctrl-C.')
    ] = False,
    state_dir: StateDirOption = None,
) -> None:
    """Show a run with the curves of its metrics."""
    if is_followed and is_json:
        raise typer.BadParameter('--follow draws curves and --json prints all points once; use one of them')
    if is_followed:
        with exit_on_interrupt('the run is not affected'), open_client(state_dir) as client:
            _print_header(run, client.get_training_run(run))
            follow(RunMetrics(run, client=client), metric or ())
        return
    with open_client(state_dir) as client, error_console.status('loading the run'):
        found = client.get_training_run(run)
        series = RunMetrics(run, client=client).get(metric or (), max_points=10_000 if is_json else POINTS)
    if is_json:
        print_json(_as_json(found, series))
        return
    _print_header(run, found)
    for name, one in series.items():
        print_plain('\n'.join(curve_lines(name, one, width=console.width)))
    for name in metric or ():
        if name not in series:
            error_console.print(f'the run has no metric {name!r}', markup=False, highlight=False)
    if not series and not metric:
        error_console.print('no metrics yet; programs log them with RunMetrics(run).log({...}, step=...)', markup=False)


def _print_header(run: str, found: Run) -> None:
    """Print the facts of a run, and its tags."""
    state = 'active' if found.is_active else 'ended'
    facts = f'{found.base_model}, rank {found.lora_rank}' if found.lora_rank else found.base_model
    name = f'{run} {found.user_metadata.get(NAME_LABEL, "")}'.strip()
    line = f'{name}: {facts}, {found.step_count} steps, version {found.version}, {state}'
    print_plain(f'{line}, {local_text(found.create_time)}')
    tags = [f'{label}={value}' for label, value in sorted(found.user_metadata.items()) if label != NAME_LABEL]
    if tags:
        print_plain(', '.join(tags))


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
