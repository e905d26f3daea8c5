"""A client's stay: active while it sends heartbeats, expired when it does not, finished when it says so.

Expiry is a view of time: `as_of` shows it at once, and the sweep merely writes it down. A
heartbeat brings an expired session back; nothing brings back a finished one. What an ended session leaves behind is
settled in its own time, once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import StrEnum

from services.gateway.errors import SessionFinished


class SessionState(StrEnum):
    """How a session stands."""

    ACTIVE = 'active'
    FINISHED = 'finished'
    EXPIRED = 'expired'


class FinishReason(StrEnum):
    """How a client ended."""

    SUCCESS = 'success'
    FAILED = 'failed'
    INTERRUPTED = 'interrupted'


@dataclass(frozen=True, kw_only=True)
class Session:
    """One session of one tenant."""

    session_id: str
    tenant_id: str
    request_id: str
    """What its creation was asked with, unique within the tenant."""
    state: SessionState
    client: str
    """Name and version of the client."""
    create_time: datetime
    """UTC."""
    heartbeat_time: datetime
    """When the client was last heard of, UTC."""
    user_metadata: Mapping[str, str] = field(default_factory=dict[str, str])
    project_id: str = ''
    """The project it belongs to; empty: none."""
    finish_reason: FinishReason | None = None
    """The first one told; None while not finished."""
    is_settled: bool = False
    """Whether what it leaves behind was looked after since it ended: adapters saved and parked, versions let go."""
    checkpoint_paths: tuple[str, ...] = ()
    """Where its adapters' weights were saved when it was last settled."""

    @property
    def is_saved(self) -> bool:
        """Whether unsaved steps are saved at its end: unless its client said that all went well."""
        return self.finish_reason is not FinishReason.SUCCESS

    def as_of(self, moment: datetime, *, lifetime: timedelta) -> 'Session':
        """Return the session as it stands at `moment` if a silence of `lifetime` ends it."""
        is_silent = moment - self.heartbeat_time > lifetime
        if self.state is SessionState.ACTIVE and is_silent:
            return replace(self, state=SessionState.EXPIRED)
        return self

    def heard(self, moment: datetime) -> 'Session':
        """Return the session after a heartbeat; an expired one is active again.

        Raises:
            SessionFinished: its client said that it was done.
        """
        if self.state is SessionState.FINISHED:
            raise SessionFinished(self.session_id)
        heard = max(moment, self.heartbeat_time)
        return replace(self, state=SessionState.ACTIVE, heartbeat_time=heard, is_settled=False)

    def finished(self, reason: FinishReason) -> 'Session':
        """Return the session after its end; the first reason told stays."""
        if self.state is SessionState.FINISHED:
            return self
        return replace(self, state=SessionState.FINISHED, finish_reason=reason, is_settled=False)

    def settled(self, ended: 'Session', checkpoint_paths: Sequence[str]) -> 'Session':
        """Return the session once what it left behind when it stood as `ended` was looked after.

        One that came back or ended otherwise meanwhile is as it was: its own end comes.
        """
        if (self.state, self.heartbeat_time) != (ended.state, ended.heartbeat_time):
            return self
        return replace(self, is_settled=True, checkpoint_paths=tuple(checkpoint_paths))

    def is_same_request(self, other: 'Session') -> bool:
        """Return whether both were asked for with the same content."""
        mine = (self.client, self.project_id, dict(self.user_metadata))
        return mine == (other.client, other.project_id, dict(other.user_metadata))
