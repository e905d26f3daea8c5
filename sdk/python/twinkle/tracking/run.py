"""Description of a tracked run: its id, names, tags and configuration."""

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypedDict, cast

from twinkle.tracking.values import checked_name

_ID = re.compile(r'[A-Za-z0-9][\w.-]{0,63}', re.ASCII)
_TAG_LENGTH = 64


class RunOptions(TypedDict, total=False):
    """Options that describe a run."""

    project: str
    """Name of a group of related runs, and of a folder in some backends. Default: 'twinkle'."""
    name: str
    """Display name. Default: the id."""
    run_id: str
    """Id of the run within the project. An existing run with this id is continued. Default: a new id, or the id of the
    run in the services."""
    tags: Sequence[str]
    """Labels for finding the run, at most 64 characters each. Default: none."""
    config: Mapping[str, Any]
    """Settings of the run: text, numbers, truth values, None, and lists or mappings of these. Default: empty."""


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """A run in the form in which backends receive it. `make` checks the options."""

    run_id: str
    project: str
    name: str
    tags: tuple[str, ...] = ()
    config: Mapping[str, Any]

    @classmethod
    def make(cls, options: RunOptions) -> 'TrackedRun':
        """Check the options of a run, and add the defaults.

        Raises:
            TypeError: An option is unknown or has the wrong type.
            ValueError: An option is invalid.
        """
        unknown = sorted(set(options) - set(RunOptions.__annotations__))
        if unknown:
            raise TypeError(f'unknown options of a run {unknown}; known are {sorted(RunOptions.__annotations__)}')
        run_id = _checked_id('run_id', options.get('run_id') or _new_id())
        return cls(
            run_id=run_id,
            project=_checked_id('project', options.get('project', 'twinkle')),
            name=_text('name', options.get('name', run_id), length=128),
            tags=_checked_tags(options.get('tags', ())),
            config=_checked_config('config', options.get('config', {})),
        )

    @property
    def flat_config(self) -> dict[str, Any]:
        """Configuration without nested mappings: the keys `{'optimizer': {'lr': 1}}` become 'optimizer/lr'."""
        return dict(_flat('', self.config))


def _new_id() -> str:
    return f'{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}'


def _checked_id(field: str, value: Any) -> str:
    if not isinstance(value, str) or not _ID.fullmatch(value):
        raise ValueError(
            f'{field}: must have 1 to 64 letters, digits and _ . - and begin with a letter or digit, got {value!r}'
        )
    return value


def _text(field: str, value: Any, *, length: int) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= length or not value.isprintable():
        raise ValueError(f'{field}: must have 1 to {length} printable characters, got {value!r}')
    return value


def _checked_tags(tags: Any) -> tuple[str, ...]:
    if isinstance(tags, str) or not isinstance(tags, Sequence):
        raise TypeError(f'tags: expected a list of strings, got {tags!r}')
    listed = cast('Sequence[Any]', tags)
    return tuple(_text(f'tags[{index}]', tag, length=_TAG_LENGTH) for index, tag in enumerate(listed))


def _checked_config(field: str, value: Any) -> Any:
    """Return a copy of the configuration as JSON values."""
    if isinstance(value, Mapping):
        items = cast('Mapping[Any, Any]', value)
        return {checked_name(field, key): _checked_config(f'{field}[{key!r}]', item) for key, item in items.items()}
    if field == 'config':
        raise TypeError(f'config: expected a mapping, got {type(value).__name__}')
    if isinstance(value, list | tuple):
        listed = cast('Sequence[Any]', value)
        return [_checked_config(f'{field}[{index}]', item) for index, item in enumerate(listed)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(
        f'{field}: expected text, a number, a list or a mapping, got {type(value).__name__}; convert it, for example'
        ' with str() or .item()'
    )


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        yield prefix, value
        return
    for key, item in cast('Mapping[str, Any]', value).items():
        yield from _flat(f'{prefix}/{key}' if prefix else key, item)
