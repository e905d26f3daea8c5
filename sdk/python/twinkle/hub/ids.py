"""Ids of models and datasets: `hf://org/name`, `ms://org/name`, a bare id, an alias, a local path."""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from twinkle.hub.errors import HubError

Source = Literal['hf', 'ms']

_NAME = re.compile(r'[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?')
_ALIASES_VARIABLE = 'TWINKLE_MODEL_ID_ALIASES'


@dataclass(frozen=True)
class HubId:
    """A repository on a hub."""

    source: Source | None
    """Which hub. None: not said."""
    name: str
    """`org/name`, or `name` alone for repositories without an owner."""

    @classmethod
    def parse(cls, text: str) -> 'HubId':
        """Read an id that is not a path; a prefix may be there twice, as where a program puts it before a whole id.

        Raises:
            HubError: it has an unknown prefix or is no `org/name`.
        """
        prefix, separator, name = text.rpartition('://')
        if separator and len({*prefix.split('://')}) == 1:
            prefix = prefix.partition('://')[0]
        if prefix not in ('', 'hf', 'ms') or (separator and not prefix):
            raise HubError(f'{text!r} begins with neither hf:// nor ms://')
        if not _NAME.fullmatch(name) or '..' in name:
            raise HubError(f'{text!r} is no id; write org/name, hf://org/name, ms://org/name or the path of a folder')
        return cls(prefix or None, name)

    def __str__(self) -> str:
        return f'{self.source}://{self.name}' if self.source else self.name


def local_path(text: str) -> Path | None:
    """Return the path `text` names if it is one: absolute, from `~` or `.`, or of something that exists here."""
    if '://' in text:
        return None
    path = Path(text).expanduser()
    is_explicit = path.is_absolute() or text.startswith(('./', '../')) or text in ('.', '..')
    return path if is_explicit or path.exists() else None


def without_alias(model_id: str) -> str:
    """Return what `model_id` stands for in `TWINKLE_MODEL_ID_ALIASES`, else `model_id`.

    The variable holds `name=id` pairs separated by commas, or a JSON object.

    Raises:
        HubError: the variable is neither.
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
        raise HubError(f'{_ALIASES_VARIABLE} must read name=id,name=id or be a JSON object, got {text!r}')
    return {name.strip(): target.strip() for name, _, target in pairs}
