"""`./run cookbook [RECIPE ...]`: recipes of tinker-cookbook, unmodified, against a stack of its own; do they learn?

The small real model is served under the name that the recipes expect. A recipe that goes on with another's weights
takes those of its last run here, or has it run first.
"""

import argparse
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from e2e.cookbook.judging import read_curve
from e2e.cookbook.recipes import MODEL, RECIPES
from e2e.cookbook.report import Result, write_report
from e2e.cookbook.workplace import Workplace
from twinkle_client.stack import DEFAULT_MODEL, StackOptions, StackState, start_stack, stop_stack

_COOKBOOK = Path(sys.prefix) / 'cookbook'
_LOG = 'log'
"""Folder of a run that the recipe itself writes."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; return 1 where a recipe failed or did not learn."""
    parser = argparse.ArgumentParser(prog='./run cookbook', description=__doc__)
    parser.add_argument('recipes', nargs='*', metavar='RECIPE', help=f'of {", ".join(RECIPES)}; all by default')
    parser.add_argument('--engine', default='auto', choices=('auto', 'torch', 'vllm'), help='what samples')
    parser.add_argument('--folder', type=Path, default=Path('.twinkle/cookbook'), help='where everything is kept')
    parser.add_argument('--limit', type=float, default=1800, metavar='SECONDS', help='of each recipe')
    options = parser.parse_args(arguments)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    if unknown := set(options.recipes) - set(RECIPES):
        parser.error(f'no recipes here: {", ".join(sorted(unknown))}; there are {", ".join(RECIPES)}')
    sys.path.append(str(_COOKBOOK))
    folder = options.folder.absolute()
    runs = folder / 'runs'
    runs.mkdir(parents=True, exist_ok=True)
    place = Workplace(folder / 'work', _COOKBOOK)
    place.prepare(small_model=DEFAULT_MODEL)
    wanted = _with_beginnings(options.recipes or list(RECIPES), runs)
    with _own_stack(folder / 'stack', options.engine) as stack:
        results = [_run(name, place, stack, runs, options) for name in wanted]
    write_report(runs, folder)
    print(f'logs and curves: {folder}')  # noqa: T201 - a command
    return int(not all(result.is_good for result in results))


def _with_beginnings(asked: Sequence[str], runs: Path) -> list[str]:
    """Return what is asked for in its order, and whose weights it needs that are not here yet."""
    needed = {RECIPES[name].begins_from for name in asked} - {''}
    return [name for name in RECIPES if name in asked or (name in needed and not _last_weights(runs / name))]


def _last_weights(run: Path) -> str:
    """Return the path of the last weights a run saved, or nothing."""
    checkpoints = run / _LOG / 'checkpoints.jsonl'
    lines = checkpoints.read_text(encoding='utf-8').splitlines() if checkpoints.is_file() else []
    return json.loads(lines[-1])['state_path'] if lines else ''


@contextmanager
def _own_stack(folder: Path, engine: str) -> Iterator[StackState]:
    os.environ['TWINKLE_MODEL_ID_ALIASES'] = f'{MODEL}={DEFAULT_MODEL}'
    options = StackOptions(state_dir=folder, base_model=MODEL, engine=engine)
    print(f'services: {options.resolved_engine} samples')  # noqa: T201 - a command
    stack = start_stack(options, report=lambda *_: None)
    try:
        yield stack
    finally:
        stop_stack(folder, report=lambda *_: None)


def _run(name: str, place: Workplace, stack: StackState, runs: Path, options: argparse.Namespace) -> Result:
    recipe, run = RECIPES[name], runs / name
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir()
    given = dict(recipe.arguments)
    weights = _last_weights(runs / recipe.begins_from) if recipe.begins_from else ''
    log_path = run / _LOG
    if recipe.begins_by:
        given[recipe.begins_by] = weights
    elif recipe.begins_from:
        log_path.mkdir()
        resumed = {'name': recipe.begins_from, 'batch': 0, 'state_path': weights}
        (log_path / 'checkpoints.jsonl').write_text(json.dumps(resumed) + '\n', encoding='utf-8')
    words = [f'{key}={value}' for key, value in {**given, 'log_path': str(log_path)}.items()]
    command = [f'tinker_cookbook.recipes.{recipe.module}', *words]
    print(f'{name}: {" ".join(words)}', flush=True)  # noqa: T201 - a command
    ended = place.run(command, stack, run / 'output.log', limit_seconds=options.limit)
    curve = read_curve(log_path / 'metrics.jsonl', recipe.metric)
    result = Result(
        recipe=name,
        status=ended.status,
        seconds=ended.seconds,
        engine=StackOptions(state_dir=place.folder, engine=options.engine).resolved_engine,
        metric=recipe.metric,
        curve=curve,
    )
    result.save(run)
    return result


if __name__ == '__main__':
    raise SystemExit(main())
