"""Command line of the recipes: options for the setting, the seed and the output folder, and handling of interrupts."""

import argparse
import math
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, fields, replace
from pathlib import Path
from types import FrameType
from typing import Any, Generic, Literal, TypeVar, get_args, get_origin, get_type_hints

from twinkle.hub import HubError, HubId, local_path, without_alias
from twinkle.tracking import TRACKERS, check_trackers

Setting = TypeVar('Setting')
Batch = TypeVar('Batch')
TRACKED = tuple(name for name in TRACKERS if name != 'service')
"""Trackers that `--track` accepts. Recipes on services always use the services' store."""
_MODEL_FIELDS = ('model', 'teacher')
"""Fields of settings that name a model."""


@dataclass(frozen=True)
class Recipe(Generic[Setting]):
    """Options of one run of a recipe."""

    name: str
    """Name of the recipe's module."""
    setting: Setting
    """Sizes and rates, in the frozen dataclass that the recipe defines."""
    seed: int
    out: Path
    """Output folder, which exists."""
    trackers: Sequence[str] = ()
    """Trackers to use in addition to `curves.jsonl` and to the services' store."""


def check_options(name: str, about: str | None, settings: Mapping[str, Setting]) -> None:
    """Read the command line, and exit if it asks for help or is invalid.

    A recipe calls it before it imports torch, which takes several seconds.

    Args:
        name, about, settings: As in `run_recipe`.
    """
    read_recipe(name, about or '', settings)


def run_recipe(
    name: str, about: str | None, settings: Mapping[str, Setting], train: Callable[[Recipe[Setting]], object]
) -> None:
    """Read the command line and train. An interrupted run prints a message and exits with status 130.

    A model that cannot be found is an error of the command line, with status 2.

    Args:
        name: Name of the recipe's module.
        about: Description for `--help`: the docstring of the module.
        settings: Settings by name, see `read_recipe`.
        train: Function that runs the recipe.
    """
    recipe = read_recipe(name, about or '', settings)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        train(recipe)
    except KeyboardInterrupt:
        print(f'interrupted; the recorded curves are in {recipe.out}', file=sys.stderr)
        raise SystemExit(130) from None
    except HubError as error:
        print(f'{name}: error: {error}; choose another one with --model', file=sys.stderr)
        raise SystemExit(2) from None


def read_recipe(name: str, about: str, settings: Mapping[str, Setting]) -> Recipe[Setting]:
    """Read the command line, and create the output folder.

    Args:
        name: Name of the recipe's module.
        about: Description for `--help`.
        settings: The settings 'cpu' and 'gpu', dataclasses of the same type. Each field is an option that overrides
            the setting. A field of type `Literal` lists the choices of its option. Integers must be at least 1, or at
            least 0 with `minimum` 0 in the metadata of the field; other numbers must be finite and not negative. A
            dataclass may raise ValueError for other values; the message is shown as an error of the command line.
    """
    parser = argparse.ArgumentParser(
        prog=f'python -m examples.cookbook.{name}',
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument('--setting', choices=sorted(settings), default='cpu', help='sizes to run with (default: cpu)')
    parser.add_argument('--seed', type=non_negative_int, default=0, help='seed of all random numbers (default: 0)')
    parser.add_argument('--out', type=Path, default=Path('out') / name, help=f'output folder (default: out/{name})')
    parser.add_argument(
        '--track',
        type=trackers,
        default=(),
        metavar='NAMES',
        help=f'comma-separated trackers of the curves: {", ".join(TRACKED)} (default: only curves.jsonl and, on'
        " services, the services' store)",
    )
    any_setting: Any = next(iter(settings.values()))
    hints = get_type_hints(type(any_setting))
    for field in fields(any_setting):
        defaults = ', '.join(f'{key}: {getattr(setting, field.name)}' for key, setting in sorted(settings.items()))
        option = '--' + field.name.replace('_', '-')
        kind = _argument_type(field, hints[field.name])
        parser.add_argument(option, **kind, help=f'override the setting ({defaults})')
    options = parser.parse_args()
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f'argument --out: {error}; choose another folder')
    if not os.access(options.out, os.W_OK):
        parser.error(f'argument --out: {options.out} is not writable; choose another folder')
    changes = {
        field.name: value for field in fields(any_setting) if (value := getattr(options, field.name)) is not None
    }
    chosen: Any = settings[options.setting]
    try:
        setting = replace(chosen, **changes)
    except ValueError as error:
        parser.error(str(error))
    return Recipe(name=name, setting=setting, seed=options.seed, out=options.out, trackers=options.track)


def endless(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Yield the batches of one epoch after another; a loader that shuffles changes the order in each epoch.

    Raises:
        ValueError: An epoch has no batch.
    """
    while True:
        has_batches = False
        for batch in batches:
            has_batches = True
            yield batch
        if not has_batches:
            raise ValueError('an epoch has no batch: there are fewer examples than the batch size; use a smaller batch')


def non_negative_int(text: str) -> int:
    """Convert the value of an option, and check its sign; argparse shows this function's name in its error messages."""
    return _checked(int(text))


def positive_int(text: str) -> int:
    """Convert the value of an option, and check that it is at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f'must be at least 1, got {number}')
    return number


def non_negative_float(text: str) -> float:
    """Convert the value of an option, and check its sign; argparse shows this function's name in its error messages."""
    number = _checked(float(text))
    if math.isinf(number):
        raise argparse.ArgumentTypeError(f'must be finite, got {number}')
    return number


def model_id(text: str) -> str:
    """Check the id or the folder of a model. The hub is asked for ids when the recipe loads the model."""
    try:
        place = without_alias(text)
        folder = local_path(place)
        if folder is None:
            HubId.parse(place)
    except HubError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if folder is not None and not (folder / 'config.json').is_file():
        raise argparse.ArgumentTypeError(f'{text} is not the folder of a model: it has no config.json')
    return text


def trackers(text: str) -> list[str]:
    """Convert the value of `--track`. A tracker that is unknown or not installed is an error of the command line."""
    try:
        names = check_trackers(text)
    except (ValueError, ImportError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if 'service' in names:
        raise argparse.ArgumentTypeError("recipes on services always use the services' store; leave out 'service'")
    return names


def _argument_type(field: Field[Any], hint: Any) -> dict[str, Any]:
    if get_origin(hint) is Literal:
        return {'choices': get_args(hint)}
    if field.name in _MODEL_FIELDS:
        return {'type': model_id}
    integer = non_negative_int if field.metadata.get('minimum') == 0 else positive_int
    return {'type': {int: integer, float: non_negative_float}.get(hint, hint)}


def _checked(number: Any) -> Any:
    # This form of the comparison also rejects NaN.
    if not number >= 0:
        raise argparse.ArgumentTypeError(f'must not be negative, got {number}')
    return number


def _interrupt(number: int, frame: FrameType | None) -> None:
    del number, frame
    raise KeyboardInterrupt
