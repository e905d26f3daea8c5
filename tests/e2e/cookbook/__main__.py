"""Runs unmodified recipes of tinker-cookbook on a new stack, and checks that they learn: `./run cookbook [RECIPE ...]`.

The stack serves the small real model under the name that the recipes expect. A recipe that starts from another recipe's
weights uses the weights of that recipe's last run. Without such a run, the command runs that recipe first.
"""

import argparse
import json
import math
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from e2e.cookbook.environment import Environment
from e2e.cookbook.judging import read_curve
from e2e.cookbook.recipes import MODEL, RECIPES
from e2e.cookbook.report import Result, write_report
from twinkle_client.stack import DEFAULT_MODEL, StackOptions, StackState, start_stack, stop_stack

_COOKBOOK = Path(sys.prefix) / 'cookbook'
_LOG = 'log'
"""Name of the folder to which a recipe writes its log."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the recipes; return 1 if a recipe failed or did not learn."""
    parser = argparse.ArgumentParser(prog='./run cookbook', description=__doc__)
    parser.add_argument('recipes', nargs='*', metavar='RECIPE', help=f'any of {", ".join(RECIPES)} (default: all)')
    parser.add_argument('--engine', default='auto', choices=('auto', 'torch', 'vllm'), help='engine of the sampler')
    parser.add_argument('--folder', type=Path, default=Path('.twinkle/cookbook'), help='folder for all files')
    parser.add_argument('--limit', type=_seconds, default=1800, metavar='SECONDS', help='time limit for each recipe')
    options = parser.parse_args(arguments)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    if unknown := set(options.recipes) - set(RECIPES):
        parser.error(
            f'argument RECIPE: unknown recipes: {", ".join(sorted(unknown))}; choose from {", ".join(RECIPES)}'
        )
    sys.path.append(str(_COOKBOOK))
    folder = options.folder.absolute()
    runs = folder / 'runs'
    runs.mkdir(parents=True, exist_ok=True)
    environment = Environment(folder / 'work', _COOKBOOK)
    environment.prepare(small_model=DEFAULT_MODEL)
    names = _with_dependencies(options.recipes or list(RECIPES), runs)
    with _running_stack(folder / 'stack', options.engine) as stack:
        results = [_run(name, environment, stack, runs, options) for name in names]
    write_report(runs, folder)
    print(f'logs and curves: {folder}')  # noqa: T201 (the output of the command)
    return int(not all(result.has_passed for result in results))


def _seconds(text: str) -> float:
    """Convert a time limit, and check that it can pass."""
    with suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f'must be a finite number above 0, got {text!r}')


def _with_dependencies(requested: Sequence[str], runs: Path) -> list[str]:
    """Return the names of the recipes to run, in the order of `RECIPES`.

    A recipe that was not requested is included if a requested recipe starts from its weights, and it has saved none.
    """
    needed = {RECIPES[name].initial_recipe for name in requested} - {''}
    return [name for name in RECIPES if name in requested or (name in needed and not _last_weights(runs / name))]


def _last_weights(run: Path) -> str:
    """Return the path of the last weights that a run saved, or an empty string if it saved no weights."""
    checkpoints = run / _LOG / 'checkpoints.jsonl'
    lines = checkpoints.read_text(encoding='utf-8').splitlines() if checkpoints.is_file() else []
    return json.loads(lines[-1])['state_path'] if lines else ''


@contextmanager
def _running_stack(folder: Path, engine: str) -> Iterator[StackState]:
    os.environ['TWINKLE_MODEL_ID_ALIASES'] = f'{MODEL}={DEFAULT_MODEL}'
    options = StackOptions(state_dir=folder, base_model=MODEL, engine=engine)
    print(f'services: sampler engine {options.engine_of(MODEL)}')  # noqa: T201 (the output of the command)
    stack = start_stack(options, report=lambda *_: None)
    try:
        yield stack
    finally:
        stop_stack(folder, report=lambda *_: None)


def _run(name: str, environment: Environment, stack: StackState, runs: Path, options: argparse.Namespace) -> Result:
    recipe, run = RECIPES[name], runs / name
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir()
    arguments = dict(recipe.arguments)
    weights = _last_weights(runs / recipe.initial_recipe) if recipe.initial_recipe else ''
    log_path = run / _LOG
    if recipe.weights_argument:
        arguments[recipe.weights_argument] = weights
    elif recipe.initial_recipe:
        log_path.mkdir()
        resumed = {'name': recipe.initial_recipe, 'batch': 0, 'state_path': weights}
        (log_path / 'checkpoints.jsonl').write_text(json.dumps(resumed) + '\n', encoding='utf-8')
    assignments = [f'{key}={value}' for key, value in {**arguments, 'log_path': str(log_path)}.items()]
    command = [f'tinker_cookbook.recipes.{recipe.module}', *assignments]
    print(f'{name}: {" ".join(assignments)}', flush=True)  # noqa: T201 (the output of the command)
    outcome = environment.run(command, stack, run / 'output.log', limit_seconds=options.limit)
    curve = read_curve(log_path / 'metrics.jsonl', recipe.metric)
    result = Result(
        recipe=name,
        status=outcome.status,
        seconds=outcome.seconds,
        engine=StackOptions(state_dir=environment.folder, engine=options.engine).engine_of(MODEL),
        metric=recipe.metric,
        curve=curve,
    )
    result.save(run)
    return result


if __name__ == '__main__':
    raise SystemExit(main())
