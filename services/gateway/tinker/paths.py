"""Names of saved weights: Tinker's paths and our own. The one place that knows both.

A Tinker path is `tinker://{run}/{kind}/{name}`; ours is `twinkle://{run}/weights/{name}`. Tinker has a space of names
for each kind, we have one for all, so the kind is the end of our name: none, `.sampler` or `.external`.
"""

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from services.gateway.http.fields import text
from services.kit.errors import InvalidField

_SCHEME, _NATIVE_SCHEME = 'tinker://', 'twinkle://'
_RUN = re.compile(r'[A-Za-z0-9][A-Za-z0-9._:-]{0,127}')
_NAME = re.compile(r'[A-Za-z0-9._-]{1,119}')


class WeightsKind(StrEnum):
    """What weights were saved for, as it stands in a path."""

    TRAINING = 'weights'
    SAMPLER = 'sampler_weights'
    EXTERNAL = 'external_weights'


_ENDS = {WeightsKind.TRAINING: '', WeightsKind.SAMPLER: '.sampler', WeightsKind.EXTERNAL: '.external'}


@dataclass(frozen=True)
class WeightsPath:
    """Saved weights of a run."""

    run_id: str
    kind: WeightsKind
    name: str

    def __str__(self) -> str:
        return f'{_SCHEME}{self.run_id}/{self.kind}/{self.name}'

    @property
    def checkpoint_id(self) -> str:
        """The part after the run: kind and name."""
        return f'{self.kind}/{self.name}'

    @property
    def native_name(self) -> str:
        """What the checkpoint is called within its run."""
        return self.name + _ENDS[self.kind]

    @property
    def native(self) -> str:
        """Our path of it."""
        return f'{_NATIVE_SCHEME}{self.run_id}/weights/{self.native_name}'


def parse_path(value: Any, field: str) -> WeightsPath:
    """Read a path that a client sent.

    Raises:
        InvalidField: it is no path of saved weights.
    """
    path = text(value, field)
    parts = path.removeprefix(_SCHEME).split('/')
    if not path.startswith(_SCHEME) or len(parts) != 3 or not _RUN.fullmatch(parts[0]):
        raise InvalidField(field, 'must be tinker://{run}/{kind}/{name}')
    return WeightsPath(parts[0], parse_kind(parts[1], field), parse_name(parts[2], field))


def parse_kind(kind: str, field: str) -> WeightsKind:
    """Read the kind of a path.

    Raises:
        InvalidField: there is no such kind.
    """
    try:
        return WeightsKind(kind)
    except ValueError as error:
        raise InvalidField(field, f'must be of one of the kinds {", ".join(WeightsKind)}') from error


def parse_name(name: str, field: str) -> str:
    """Read the name of saved weights.

    Raises:
        InvalidField: it has characters that names may not have, or ends as only names of other kinds do.
    """
    if not _NAME.fullmatch(name):
        raise InvalidField(field, 'a name has 1 to 119 letters, digits, ".", "_" and "-"')
    if any(end and name.endswith(end) for end in _ENDS.values()):
        raise InvalidField(field, 'a name may not end in ".sampler" or ".external"')
    return name


def path_of_native(native: str) -> WeightsPath:
    """Return the path of a checkpoint of ours, by its own path."""
    run_id, _, name = native.removeprefix(_NATIVE_SCHEME).partition('/weights/')
    return path_of_checkpoint(run_id, name)


def path_of_checkpoint(run_id: str, native_name: str) -> WeightsPath:
    """Return the path of a checkpoint of ours, by its run and its name within it."""
    for kind, end in _ENDS.items():
        if end and native_name.endswith(end):
            return WeightsPath(run_id, kind, native_name.removesuffix(end))
    return WeightsPath(run_id, WeightsKind.TRAINING, native_name)
