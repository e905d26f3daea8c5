"""Ids of models and datasets: `hf://org/name`, `ms://org/name`, a bare id, an alias or a local path."""

import errno
import json
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from twinkle.hub.errors import HubError

Source = Literal['hf', 'ms']

_NAME = re.compile(r'[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?')
_ALIASES_VARIABLE = 'TWINKLE_MODEL_ID_ALIASES'


@dataclass(frozen=True)
class HubId:
    """The id of a repository on a hub."""

    source: Source | None
    """The hub: 'hf' (Hugging Face), 'ms' (ModelScope), or None for a bare id."""
    name: str
    """`org/name`, or only `name` for repositories without an owner."""

    @classmethod
    def parse(cls, text: str) -> 'HubId':
        """Parse an id that is not a path.

        A repeated prefix such as `ms://ms://org/name` is accepted, because some programs add a second prefix.

        Raises:
            HubError: the id has an unknown prefix, or the rest of the id is not of the form `org/name` or `name`.
        """
        prefix, separator, name = text.rpartition('://')
        if separator and len({*prefix.split('://')}) == 1:
            prefix = prefix.partition('://')[0]
        if prefix not in ('', 'hf', 'ms') or (separator and not prefix):
            raise HubError(f'{text!r} has an unknown prefix; use hf:// or ms://')
        if not _NAME.fullmatch(name) or '..' in name:
            raise HubError(f'invalid id {text!r}; use org/name, hf://org/name, ms://org/name or the path of a folder')
        return cls(prefix or None, name)

    def __str__(self) -> str:
        return f'{self.source}://{self.name}' if self.source else self.name


def local_path(text: str) -> Path | None:
    """Return `text` as a path with `~` expanded, or None if it is neither an explicit nor an existing path.

    Explicit paths are absolute (also after the expansion of `~`), begin with `./` or `../`, or are `.` or `..`. Text
    that contains `://`, or that is longer than a path may be, is never a path.
    """
    if '://' in text:
        return None
    path = Path(text)
    # `~name` is unchanged if no user has this name.
    with suppress(RuntimeError):
        path = path.expanduser()
    try:
        exists = path.exists()
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return None
        raise
    is_explicit = path.is_absolute() or text.startswith(('./', '../')) or text in ('.', '..')
    return path if is_explicit or exists else None


def without_alias(model_id: str) -> str:
    """Return the id to which the alias `model_id` refers, or `model_id` if it is not an alias.

    The environment variable `TWINKLE_MODEL_ID_ALIASES` defines aliases as `name=id` pairs separated by commas, or as a
    JSON object.

    Raises:
        HubError: the variable is malformed.
    """
    text = os.environ.get(_ALIASES_VARIABLE, '').strip()
    if not text:
        return model_id
    return _aliases(text).get(model_id, model_id)


def _aliases(text: str) -> dict[str, str]:
    if text.startswith('{'):
        try:
            return {str(key): str(value) for key, value in json.loads(text).items()}
        except json.JSONDecodeError as error:
            raise HubError(f'{_ALIASES_VARIABLE} is not JSON: {error}') from error
    pairs = [pair.partition('=') for pair in text.split(',') if pair.strip()]
    if not all(separator for _, separator, _ in pairs):
        raise HubError(f'{_ALIASES_VARIABLE} must have the form name=id,name=id or be a JSON object, got {text!r}')
    return {name.strip(): target.strip() for name, _, target in pairs}
