"""The words every recipe understands: which setting, which seed, where its curves go."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

Setting = TypeVar('Setting')


@dataclass(frozen=True)
class Recipe(Generic[Setting]):
    """What a person asked of a recipe."""

    setting: Setting
    """Sizes and rates; a frozen dataclass of the recipe's own."""
    seed: int
    out: Path
    """Folder of the curves."""


def read_recipe(name: str, about: str, settings: Mapping[str, Setting]) -> Recipe[Setting]:
    """Read the command line.

    Args:
        name: the recipe's module name.
        about: what `--help` says; the module's docstring.
        settings: 'cpu' and 'gpu' to dataclasses of one type; each of their fields is an option that overrides it.
    """
    parser = argparse.ArgumentParser(
        prog=f'python -m examples.cookbook.{name}',
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument('--setting', choices=sorted(settings), default='cpu', help='sizes to run with (default: cpu)')
    parser.add_argument('--seed', type=int, default=0, help='of everything that is drawn (default: 0)')
    parser.add_argument('--out', type=Path, help=f'folder of the curves (default: out/{name})')
    parts: Any = next(iter(settings.values()))
    for part in fields(parts):
        defaults = ', '.join(f'{key}: {getattr(setting, part.name)}' for key, setting in sorted(settings.items()))
        option = '--' + part.name.replace('_', '-')
        parser.add_argument(option, type=type(getattr(parts, part.name)), help=f'override the setting ({defaults})')
    options = parser.parse_args()
    changes = {part.name: value for part in fields(parts) if (value := getattr(options, part.name)) is not None}
    chosen: Any = settings[options.setting]
    return Recipe(setting=replace(chosen, **changes), seed=options.seed, out=options.out or Path('out') / name)
