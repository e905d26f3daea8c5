"""The words every recipe understands: which setting, which seed, where its curves go; and how a run ends."""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import FrameType
from typing import Any, Generic, Literal, TypeVar, get_args, get_origin, get_type_hints

Setting = TypeVar('Setting')
Batch = TypeVar('Batch')


@dataclass(frozen=True)
class Recipe(Generic[Setting]):
    """What a person asked of a recipe."""

    setting: Setting
    """Sizes and rates; a frozen dataclass of the recipe's own."""
    seed: int
    out: Path
    """Folder of the curves."""


def run_recipe(
    name: str, about: str | None, settings: Mapping[str, Setting], train: Callable[[Recipe[Setting]], object]
) -> None:
    """Read the command line and train; an interrupted run ends with a sentence and status 130.

    Args:
        name: the recipe's module name.
        about: what `--help` says; the module's docstring.
        settings: as `read_recipe` takes them.
        train: does the work.
    """
    recipe = read_recipe(name, about or '', settings)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        train(recipe)
    except KeyboardInterrupt:
        print(f'interrupted; what was recorded is in {recipe.out}', file=sys.stderr)
        raise SystemExit(130) from None


def read_recipe(name: str, about: str, settings: Mapping[str, Setting]) -> Recipe[Setting]:
    """Read the command line.

    Args:
        name: the recipe's module name.
        about: what `--help` says.
        settings: 'cpu' and 'gpu' to dataclasses of one type; each of their fields is an option that overrides it. A
            `Literal` names the choices of an option, and no number may be negative.
    """
    parser = argparse.ArgumentParser(
        prog=f'python -m examples.cookbook.{name}',
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument('--setting', choices=sorted(settings), default='cpu', help='sizes to run with (default: cpu)')
    parser.add_argument('--seed', type=_natural, default=0, help='of everything that is drawn (default: 0)')
    parser.add_argument(
        '--out', type=Path, default=Path('out') / name, help=f'folder of the curves (default: out/{name})'
    )
    parts: Any = next(iter(settings.values()))
    hints = get_type_hints(type(parts))
    for part in fields(parts):
        defaults = ', '.join(f'{key}: {getattr(setting, part.name)}' for key, setting in sorted(settings.items()))
        option = '--' + part.name.replace('_', '-')
        parser.add_argument(option, **_kind(hints[part.name]), help=f'override the setting ({defaults})')
    options = parser.parse_args()
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f'argument --out: {error}; name another folder')
    if not os.access(options.out, os.W_OK):
        parser.error(f'argument --out: {options.out} cannot be written to; name another folder')
    changes = {part.name: value for part in fields(parts) if (value := getattr(options, part.name)) is not None}
    chosen: Any = settings[options.setting]
    return Recipe(setting=replace(chosen, **changes), seed=options.seed, out=options.out)


def endless(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Give the batches of one epoch after the other; a loader that shuffles has another order in each.

    Raises:
        ValueError: an epoch has no batch.
    """
    while True:
        has_batches = False
        for batch in batches:
            has_batches = True
            yield batch
        if not has_batches:
            raise ValueError('an epoch has no batch: there are fewer examples than one batch takes')


def _kind(hint: Any) -> dict[str, Any]:
    if get_origin(hint) is Literal:
        return {'choices': get_args(hint)}
    return {'type': {int: _natural, float: _positive}.get(hint, hint)}


def _natural(text: str) -> int:
    return _not_negative(int(text))


def _positive(text: str) -> float:
    return _not_negative(float(text))


def _not_negative(number: Any) -> Any:
    # A NaN is no number to compare with.
    if not number >= 0:
        raise argparse.ArgumentTypeError(f'must not be negative, got {number}')
    return number


def _interrupt(number: int, frame: FrameType | None) -> None:
    del number, frame
    raise KeyboardInterrupt
