"""Ids of models and datasets: `hf://org/name`, `ms://org/name`, a bare id, an alias or a local path."""

import errno
import json
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from twinkle.data_format import base_model_id
from twinkle.hub.cache import cache_dir
from twinkle.hub.errors import HubError, RepositoryMoved

Source = Literal['hf', 'ms']

_NAME = re.compile(r'[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?')
_ALIASES_VARIABLE = 'TWINKLE_MODEL_ID_ALIASES'
_SNAPSHOT = re.compile(r'/models--([^/]+)/snapshots/')
"""Part of a path in the cache of Hugging Face's client, with the name of the repository."""
_BUILT_IN_OWNER = 'twinkle/'
"""Folder of the built-in models below `models` in the cache."""


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

    def refuse_moved(self, found: str) -> None:
        """Raise RepositoryMoved if a hub returned the repository under the name `found`, which is a different one."""
        if found.lower() != self.name.lower():
            raise RepositoryMoved(self.name, found)

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
    return path if path.is_absolute() or _is_relative_path(text) or exists else None


def repository_name(model_id: str) -> str | None:
    """Return the name of the repository that a base model comes from, or None for a folder that records no name.

    An id names its repository, with or without a prefix. A folder records the name if it is the target of an alias, or
    in the mirror or a cache. Files are not read: the `_name_or_path` in a fine-tuned model's `config.json` may name the
    model before the fine-tuning.
    """
    if '://' in model_id or not (Path(model_id).is_absolute() or _is_relative_path(model_id) or model_id[:1] == '~'):
        return _name_of_id(model_id)
    names = [name for name, target in _known_aliases().items() if target == model_id]
    path = Path(model_id).expanduser().as_posix()
    if snapshot := _SNAPSHOT.search(f'{path}/'):
        names.append(snapshot[1].replace('--', '/'))
    roots = [Path(text).expanduser() for text in (os.environ.get('TWINKLE_HUB_DIR'), str(cache_dir())) if text]
    for root in roots:
        name = path.removeprefix(f'{(root / "models").as_posix()}/')
        names.append(name.removeprefix(_BUILT_IN_OWNER) if root == cache_dir() else name)
    return next(filter(None, map(_name_of_id, names)), None)


def public_name(model_id: str) -> str:
    """Return the name under which files for other machines name a base model: never the path of a folder."""
    return repository_name(model_id) or Path(model_id).expanduser().absolute().name


def _name_of_id(model_id: str) -> str | None:
    try:
        return HubId.parse(base_model_id(model_id)).name
    except HubError:
        return None


def _is_relative_path(text: str) -> bool:
    return text.startswith(('./', '../')) or text in ('.', '..')


def without_alias(model_id: str) -> str:
    """Return the id to which the alias `model_id` refers, or `model_id` if it is not an alias.

    The environment variable `TWINKLE_MODEL_ID_ALIASES` defines aliases as `name=id` pairs separated by commas, or as a
    JSON object.

    Raises:
        HubError: the variable is malformed.
    """
    return _aliases().get(model_id, model_id)


def _known_aliases() -> dict[str, str]:
    """Return the aliases; none if the variable is malformed, for which loading the model reports an error."""
    try:
        return _aliases()
    except HubError:
        return {}


def _aliases() -> dict[str, str]:
    text = os.environ.get(_ALIASES_VARIABLE, '').strip()
    if text.startswith('{'):
        try:
            return {str(key): str(value) for key, value in json.loads(text).items()}
        except json.JSONDecodeError as error:
            raise HubError(f'{_ALIASES_VARIABLE} is not JSON: {error}') from error
    pairs = [pair.partition('=') for pair in text.split(',') if pair.strip()]
    if not all(separator for _, separator, _ in pairs):
        raise HubError(f'{_ALIASES_VARIABLE} must have the form name=id,name=id or be a JSON object, got {text!r}')
    return {name.strip(): target.strip() for name, _, target in pairs}
