"""States of a client's session: active, expired without heartbeats, or finished at the client's request.

An active session counts as expired once its last heartbeat is older than the lifetime; the sweep only stores the state.
A heartbeat makes an expired session active again, but is an error for a finished one. A session is settled after it has
ended: its queued work is dropped, its adapters are saved (if `is_saved`) and parked, and its versions are unpinned.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import StrEnum

from twinkle_services.gateway.errors import SessionFinished


class SessionState(StrEnum):
    """State of a session; an expired one becomes active again at its next heartbeat."""

    ACTIVE = 'active'
    FINISHED = 'finished'
    EXPIRED = 'expired'


class FinishReason(StrEnum):
    """Reason that a client gives for finishing its session."""

    SUCCESS = 'success'
    FAILED = 'failed'
    INTERRUPTED = 'interrupted'


@dataclass(frozen=True, kw_only=True)
class SessionRequest:
    """Request for a new session."""

    request_id: str
    client: str
    """Name and version of the client."""
    user_metadata: Mapping[str, str]
    project_id: str = ''
    """Project of the caller's tenant; empty selects the project of the caller's key."""


@dataclass(frozen=True, kw_only=True)
class Session:
    """Session of a client; the runs and sampling handles that the client creates belong to it."""

    session_id: str
    tenant_id: str
    request_id: str
    """Id of the request that created the session, unique within the tenant."""
    state: SessionState
    client: str
    """Name and version of the client."""
    create_time: datetime
    """UTC."""
    heartbeat_time: datetime
    """Time of the last heartbeat, UTC."""
    user_metadata: Mapping[str, str] = field(default_factory=dict[str, str])
    project_id: str = ''
    """Project that the session belongs to; empty if absent."""
    finish_reason: FinishReason | None = None
    """Reason that the client gave when it finished the session; None if it has not finished the session."""
    is_settled: bool = False
    """Whether the session is settled: its work is dropped, its adapters are parked, and its versions are unpinned."""
    checkpoint_paths: tuple[str, ...] = ()
    """Paths of the checkpoints with the current weights of the session's adapters when the session was last settled."""

    @property
    def is_saved(self) -> bool:
        """Whether unsaved steps are saved when the session ends. A client that reports success saves them itself."""
        return self.finish_reason is not FinishReason.SUCCESS

    @property
    def is_unsettled(self) -> bool:
        """Whether the session has ended and is not settled."""
        return self.state is not SessionState.ACTIVE and not self.is_settled

    def as_of(self, moment: datetime, *, lifetime: timedelta) -> 'Session':
        """Return the session with its state at `moment`; it expires if its last heartbeat is older than `lifetime`."""
        if self.state is SessionState.ACTIVE and moment - self.heartbeat_time > lifetime:
            return replace(self, state=SessionState.EXPIRED)
        return self

    def with_heartbeat(self, moment: datetime) -> 'Session':
        """Return the session after a heartbeat at `moment`; an expired session becomes active.

        Raises:
            SessionFinished: the client has finished the session.
        """
        if self.state is SessionState.FINISHED:
            raise SessionFinished(self.session_id)
        heartbeat_time = max(moment, self.heartbeat_time)
        return replace(self, state=SessionState.ACTIVE, heartbeat_time=heartbeat_time, is_settled=False)

    def finished(self, reason: FinishReason) -> 'Session':
        """Return the finished session; a finished session keeps its first reason."""
        if self.state is SessionState.FINISHED:
            return self
        return replace(self, state=SessionState.FINISHED, finish_reason=reason, is_settled=False)

    def settled(self, ended: 'Session', checkpoint_paths: Sequence[str]) -> 'Session':
        """Return the session marked as settled; `ended` is this session at the time when it was settled.

        If its state or last heartbeat has changed since then, the session is returned unchanged, to be settled again.
        """
        if (self.state, self.heartbeat_time) != (ended.state, ended.heartbeat_time):
            return self
        return replace(self, is_settled=True, checkpoint_paths=tuple(checkpoint_paths))

    def is_same_request(self, other: 'Session') -> bool:
        """Return whether both sessions were requested with the same content."""
        own = (self.client, self.project_id, dict(self.user_metadata))
        return own == (other.client, other.project_id, dict(other.user_metadata))


@dataclass(frozen=True, kw_only=True)
class ParkedAdapter:
    """Result of parking an adapter."""

    is_idle: bool
    """Whether the adapter is parked and has no lease. If not, as during an operation, it must be parked again later."""
    checkpoint_path: str
    """Checkpoint that contains the adapter's current weights, saved now or earlier; empty without such a checkpoint."""
