"""Checkpoints on their way to a hub or a folder."""

import re
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from services.kit.errors import DomainError, InvalidField, NotSupportedHere

_REPOSITORY = re.compile(r'[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}', re.ASCII)
_FOLDER = re.compile(r'/?[A-Za-z0-9][\w.-]{0,127}(/[A-Za-z0-9][\w.-]{0,127}){0,7}/?', re.ASCII)
_FIRST_PAUSE = timedelta(seconds=5)
_LONGEST_PAUSE = timedelta(minutes=10)


class ExportState(StrEnum):
    """How far an export is."""

    WAITING = 'waiting'
    RUNNING = 'running'
    DONE = 'done'
    FAILED = 'failed'
    CANCELLED = 'cancelled'

    @property
    def is_over(self) -> bool:
        """Whether nothing more will become of it."""
        return self not in {ExportState.WAITING, ExportState.RUNNING}


@dataclass(frozen=True, kw_only=True)
class Export:
    """A checkpoint on its way."""

    export_id: str
    tenant_id: str
    request_id: str
    checkpoint_path: str
    digest: str
    """blake3 of the checkpoint's state when it was asked for, hexadecimal."""
    target: str
    """As it was asked for."""
    is_private: bool
    sealed_token: bytes = b''
    """The hub's token, encrypted; empty once it is over, and where there is none."""
    state: ExportState = ExportState.WAITING
    read_bytes: int = 0
    """Of the archive, by this try."""
    size_bytes: int = 0
    """Of the archive; 0: not known yet."""
    attempt_count: int = 0
    url: str = ''
    commit: str = ''
    error: DomainError | None = None
    """Why it failed, or why it waits."""
    create_time: datetime
    update_time: datetime
    due_time: datetime
    """When it may be begun; while it runs, when whoever carries it out counts as gone."""

    def is_of(self, checkpoint_path: str, target: str, *, is_private: bool) -> bool:
        """Whether it is what was asked for."""
        return (self.checkpoint_path, self.target, self.is_private) == (checkpoint_path, target, is_private)

    def is_push_of(self, other: 'Export') -> bool:
        """Whether both send the same state of a checkpoint to the same place."""
        pushes = [(item.checkpoint_path, item.digest, item.target, item.is_private) for item in (self, other)]
        return pushes[0] == pushes[1]


@dataclass(frozen=True)
class Target:
    """Where an export goes."""

    kind: str
    """'hf' or 'file'."""
    name: str
    """A repository, or a relative folder without '.' and '..'."""


def parse_target(text: str) -> Target:
    """Read a target.

    Raises:
        InvalidField: it is none.
        NotSupportedHere: its hub cannot be written to from here.
    """
    kind, separator, name = text.partition('://')
    if separator and kind == 'hf' and _REPOSITORY.fullmatch(name) and '..' not in name:
        return Target(kind, name)
    if separator and kind == 'file' and _FOLDER.fullmatch(name) and '..' not in name:
        return Target(kind, name.strip('/'))
    if separator and kind == 'ms':
        raise NotSupportedHere('an export to ModelScope', 'gateway')
    raise InvalidField('target', 'must be hf://<owner>/<name> or file:///<folder>')


def pause_after(attempt_count: int) -> timedelta:
    """Return how long an export waits after so many tries."""
    return min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** min(attempt_count - 1, 10))
