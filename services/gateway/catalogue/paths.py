"""Paths of saved weights in the forms of Tinker and Twinkle; only this module converts between them.

A Tinker path is `tinker://{run}/{kind}/{name}`; a native path is `twinkle://{run}/weights/{name}`. Tinker has a
namespace for each kind. Twinkle has one namespace, so the end of a native name shows the kind: no suffix, `.sampler` or
`.external`. Each `parse_` function raises InvalidField for `field` if the value is invalid.
"""

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from twinkle_services.kit.errors import InvalidField

SCHEME, NATIVE_SCHEME = 'tinker://', 'twinkle://'
_RUN = re.compile(r'[A-Za-z0-9][A-Za-z0-9._:-]{0,127}')
_NAME = re.compile(r'[A-Za-z0-9._-]{1,119}')  # with the longest suffix, at most 128 characters


class WeightsKind(StrEnum):
    """Purpose of saved weights, as spelled in a path."""

    TRAINING = 'weights'
    SAMPLER = 'sampler_weights'
    EXTERNAL = 'external_weights'


_SUFFIXES = {WeightsKind.TRAINING: '', WeightsKind.SAMPLER: '.sampler', WeightsKind.EXTERNAL: '.external'}


@dataclass(frozen=True)
class WeightsPath:
    """Path of saved weights; `str` returns the Tinker form."""

    run_id: str
    kind: WeightsKind
    name: str

    def __str__(self) -> str:
        return f'{SCHEME}{self.run_id}/{self.kind}/{self.name}'

    @property
    def checkpoint_id(self) -> str:
        """Id in the Tinker API: `{kind}/{name}`."""
        return f'{self.kind}/{self.name}'

    @property
    def native_name(self) -> str:
        """Name of the native checkpoint within its run."""
        return self.name + _SUFFIXES[self.kind]

    @property
    def native(self) -> str:
        """Native path."""
        return f'{NATIVE_SCHEME}{self.run_id}/weights/{self.native_name}'


def parse_path(value: Any, field: str) -> WeightsPath:
    """Parse a Tinker path."""
    parts = value.removeprefix(SCHEME).split('/') if isinstance(value, str) and value.startswith(SCHEME) else []
    if len(parts) != 3 or not _RUN.fullmatch(parts[0]):
        raise InvalidField(field, 'must be tinker://{run}/{kind}/{name}')
    return WeightsPath(parts[0], parse_kind(parts[1], field), parse_name(parts[2], field))


def parse_sampler_path(value: Any, field: str) -> WeightsPath:
    """Parse a Tinker path, and check that its weights were saved for sampling."""
    path = parse_path(value, field)
    if path.kind is not WeightsKind.SAMPLER:
        problem = f'must be tinker://{{run}}/{WeightsKind.SAMPLER}/{{name}}, got the kind {path.kind}'
        raise InvalidField(field, f'{problem}; save with save_weights_for_sampler')
    return path


def parse_kind(kind: str, field: str) -> WeightsKind:
    """Parse the kind in a path."""
    try:
        return WeightsKind(kind)
    except ValueError as error:
        raise InvalidField(field, f'must have one of the kinds {", ".join(WeightsKind)}') from error


def parse_name(name: str, field: str) -> str:
    """Check and return the name of saved weights."""
    if not _NAME.fullmatch(name):
        raise InvalidField(field, 'must be a name of 1 to 119 letters, digits, ".", "_" and "-"')
    if any(end and name.endswith(end) for end in _SUFFIXES.values()):
        raise InvalidField(field, 'must be a name that does not end in ".sampler" or ".external"')
    return name


def path_of_native(native: str) -> WeightsPath:
    """Return the Tinker form of a native path. The path must be valid; this function does not check it."""
    run_id, _, name = native.removeprefix(NATIVE_SCHEME).partition('/weights/')
    for kind, end in _SUFFIXES.items():
        if end and name.endswith(end):
            return WeightsPath(run_id, kind, name.removesuffix(end))
    return WeightsPath(run_id, WeightsKind.TRAINING, name)
