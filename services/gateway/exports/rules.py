"""Exports of checkpoints to hubs and folders: states, targets and retries."""

import re
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum

from twinkle_services.kit.errors import DomainError, InvalidField, NotSupportedHere

MAX_UNFINISHED = 16
"""Maximum number of unfinished exports of one tenant."""

_REPOSITORY = re.compile(r'[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}', re.ASCII)
_FOLDER = re.compile(r'/?[A-Za-z0-9][\w.-]{0,127}(/[A-Za-z0-9][\w.-]{0,127}){0,7}/?', re.ASCII)
_FIRST_PAUSE = timedelta(seconds=5)
_LONGEST_PAUSE = timedelta(minutes=10)


class ExportState(StrEnum):
    """State of an export; DONE, FAILED and CANCELLED are final."""

    WAITING = 'waiting'
    RUNNING = 'running'
    DONE = 'done'
    FAILED = 'failed'
    CANCELLED = 'cancelled'


@dataclass(frozen=True, kw_only=True)
class ExportRequest:
    """Request to export a checkpoint."""

    request_id: str
    checkpoint_path: str
    target: str
    """`hf://<owner>/<name>` or `file:///<folder>`."""
    hub_token: str = field(repr=False)
    is_private: bool


@dataclass(frozen=True, kw_only=True)
class Export:
    """Export of a checkpoint to a hub or a folder, with its progress."""

    export_id: str
    tenant_id: str
    request_id: str
    checkpoint_path: str
    digest: str
    """blake3 of the checkpoint's state at the time of the request, hexadecimal."""
    target: str
    """Target as requested."""
    is_private: bool
    sealed_token: bytes = b''
    """Encrypted token of the hub; empty for folders and for finished exports."""
    state: ExportState = ExportState.WAITING
    read_bytes: int = 0
    """Bytes of the archive that the current or last attempt has read."""
    size_bytes: int = 0
    """Size of the archive; 0 while it is unknown."""
    attempt_count: int = 0
    url: str = ''
    """Location of the exported files; empty until the export is done."""
    commit: str = ''
    error: DomainError | None = None
    """Error of a failed export, or of the last failed attempt of an unfinished export."""
    create_time: datetime
    update_time: datetime
    due_time: datetime
    """Earliest start of the next attempt; for a running export, the end of its lease."""

    def is_same_request(self, request: ExportRequest) -> bool:
        """Return whether the export was created by a request with the same content, apart from the token."""
        own = (self.checkpoint_path, self.target, self.is_private)
        return own == (request.checkpoint_path, request.target, request.is_private)

    def is_same_export(self, other: 'Export') -> bool:
        """Return whether both exports send the same state of a checkpoint to the same target with equal visibility."""
        compared = [(item.checkpoint_path, item.digest, item.target, item.is_private) for item in (self, other)]
        return compared[0] == compared[1]


@dataclass(frozen=True)
class Target:
    """Destination of an export."""

    kind: str
    """'hf' or 'file'."""
    name: str
    """Repository, or a relative folder without '.' and '..'."""


@dataclass(frozen=True)
class SentFolder:
    """Location of an exported folder."""

    url: str
    commit: str = ''
    """Commit of the files; empty for folders."""


def parse_target(text: str) -> Target:
    """Parse a target.

    Raises:
        InvalidField: the text is not a valid target.
        NotSupportedHere: the gateway cannot export to this hub.
    """
    kind, separator, name = text.partition('://')
    if separator and kind == 'hf' and _REPOSITORY.fullmatch(name) and '..' not in name:
        return Target(kind, name)
    if separator and kind == 'file' and _FOLDER.fullmatch(name) and '..' not in name:
        return Target(kind, name.strip('/'))
    if separator and kind == 'ms':
        raise NotSupportedHere('an export to ModelScope', 'gateway')
    raise InvalidField('target', 'must be hf://<owner>/<name> or file:///<folder>')


def check_token(target: Target, token: str) -> None:
    """Check that a request has a token if and only if its target needs one.

    Raises:
        InvalidField: the token is missing, superfluous or not printable ASCII.
    """
    if target.kind == 'file' and token:
        raise InvalidField('hub_token', 'must be empty for an export to a folder')
    if target.kind != 'file' and not token:
        raise InvalidField('hub_token', 'is required; give a token with write access to the hub')
    if not (token.isascii() and token.isprintable()):
        raise InvalidField('hub_token', 'must consist of printable ASCII characters')


def pause_after(attempt_count: int) -> timedelta:
    """Return the pause after a failed attempt; it doubles with each attempt, up to ten minutes."""
    return min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** min(attempt_count - 1, 10))
