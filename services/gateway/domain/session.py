"""A client's stay: active while it sends heartbeats, expired when it does not, finished when it says so.

Expiry is a view of time: `as_of` shows it at once, and the sweep merely writes it down. A
heartbeat brings an expired session back; nothing brings back a finished one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import StrEnum

from services.gateway.domain.errors import SessionFinished


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
    finish_reason: FinishReason | None = None
    """The first one told; None while not finished."""

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
        return replace(self, state=SessionState.ACTIVE, heartbeat_time=max(moment, self.heartbeat_time))

    def finished(self, reason: FinishReason) -> 'Session':
        """Return the session after its end; the first reason told stays."""
        if self.state is SessionState.FINISHED:
            return self
        return replace(self, state=SessionState.FINISHED, finish_reason=reason)

    def is_same_request(self, other: 'Session') -> bool:
        """Return whether both were asked for with the same content."""
        return self.client == other.client and dict(self.user_metadata) == dict(other.user_metadata)
