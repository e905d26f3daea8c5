"""Futures and their notifications. A future is an accepted request with an id; its outcome is fetched later.

A future is durable before its id is returned. Futures of one lane run strictly in the order of their positions,
regardless of the order of arrival (see `lanes`). A future without a lane runs as soon as a slot is free.
"""

import hashlib
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum

from twinkle_services.kit.errors import DomainError, RequestIdReused

CREATE_KIND, EXECUTE_KIND, DELETE_KIND = 'create_adapter', 'execute', 'delete_adapter'
SAMPLE_KIND, REFUSED_KIND = 'sample', 'refused'
"""Kinds of futures; `executors` has a class for each."""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Upper bounds of a resource that tenants share."""

    per_tenant: int
    total: int


class FutureTaken(Exception):
    """Another gateway owns the future, because this gateway's lease expired. This gateway can no longer change it."""


class PayloadsNotShared(Exception):
    """Two gateways on one database use different payload folders, so neither could read the other's requests."""


class FutureState(StrEnum):
    """State of a future; every state but WAITING counts as finished."""

    WAITING = 'waiting'
    """Accepted: queued or running."""
    DONE = 'done'
    FAILED = 'failed'
    EXPIRED = 'expired'
    """Finished so long ago that its result is deleted."""


@dataclass(frozen=True, kw_only=True)
class FutureRequest:
    """Request for work that runs as a future."""

    kind: str
    """One of the kinds above."""
    key: str
    """Unique among the tenant's futures: a repeated request with the same key returns the same future."""
    payload: bytes
    """Serialized request; opaque here, and stored outside the database until the future is finished. Equal requests
    must have equal bytes."""
    session_id: str
    """Session that sent the request; empty if absent."""
    lane: str = ''
    """Name of the lane, such as an adapter's id; empty if the future does not wait for other futures."""
    position: int = 0
    """Position in the lane: consecutive numbers from 0. Ignored without a lane."""
    note: str = ''
    """Facts that the API needs to return the outcome; stored with the future."""
    is_note_free: bool = False
    """Whether a repeated request may have a different note; the first note is stored."""
    topic: str = ''
    """Name under which clients follow the completion of many futures; empty if absent."""
    base_model: str = ''
    """Base model that runs the future. Each base model has separate slots. Empty if the base model is not known."""


@dataclass(frozen=True, kw_only=True)
class Future:
    """Accepted request. See `FutureRequest` for the fields without a description."""

    future_id: str
    """Derived from tenant and key by `future_id_of`, so that a repeated request finds the future."""
    tenant_id: str
    session_id: str
    kind: str
    key: str
    lane: str
    position: int
    note: str
    fingerprint: str
    """Digest of the request."""
    state: FutureState
    create_time: datetime
    """UTC."""
    number: int | None = None
    """Number that the executor stored, such as the sequence number of an operation; None if it has stored no number."""
    finish_time: datetime | None = None
    """UTC; None before the future is finished."""
    error: DomainError | None = None
    """Error of a failed future."""
    topic: str = ''
    base_model: str = ''
    owner: str = ''
    """Id of the gateway that runs the future; empty with SQLite, which only one gateway can use."""

    @classmethod
    def accepted(cls, request: FutureRequest, *, tenant_id: str, moment: datetime) -> 'Future':
        return cls(
            future_id=future_id_of(tenant_id, request.key),
            tenant_id=tenant_id,
            session_id=request.session_id,
            kind=request.kind,
            key=request.key,
            lane=request.lane,
            position=request.position,
            note=request.note,
            fingerprint=fingerprint_of(request),
            state=FutureState.WAITING,
            create_time=moment,
            topic=request.topic,
            base_model=request.base_model,
        )

    @property
    def is_finished(self) -> bool:
        return self.state is not FutureState.WAITING

    @property
    def payload_name(self) -> str:
        """Name of the stored request. It depends on the content, so that a different request cannot overwrite it."""
        return f'{self.future_id}-{self.fingerprint[:16]}.request'

    @property
    def attempts_name(self) -> str:
        """Name of the stored number of attempts to run a resumed future."""
        return f'{self.future_id}.attempts'

    @property
    def result_name(self) -> str:
        """Name of the stored result. It depends on the owner, so that a previous owner cannot overwrite it."""
        if not self.owner:
            return f'{self.future_id}.result'
        mark = hashlib.blake2s(f'{self.future_id}{self.owner}'.encode(), digest_size=8).hexdigest()
        return f'{self.future_id}-{mark}.result'

    def done(self, *, moment: datetime) -> 'Future':
        """Return the future as done; its result is stored separately."""
        return replace(self, state=FutureState.DONE, finish_time=moment)

    def failed(self, error: DomainError, *, moment: datetime) -> 'Future':
        return replace(self, state=FutureState.FAILED, finish_time=moment, error=error)

    def check_repeat(self, fingerprint: str) -> None:
        """Check that a repeated request is equal to the first one.

        Raises:
            RequestIdReused: the request differs.
        """
        if fingerprint != self.fingerprint:
            raise RequestIdReused(self.key)


def future_id_of(tenant_id: str, key: str) -> str:
    """Return the id of a tenant's future with that key, whether or not it was accepted."""
    return 'fu-' + hashlib.blake2s(f'{tenant_id}\0{key}'.encode(), digest_size=20).hexdigest()


def fingerprint_of(request: FutureRequest) -> str:
    """Return a digest of a request, for the comparison of repeated requests."""
    note = '' if request.is_note_free else request.note
    head = '\0'.join((request.kind, request.key, request.lane, str(request.position), note))
    digest = hashlib.blake2b(f'{head}\0'.encode(), digest_size=20)
    digest.update(request.payload)
    return digest.hexdigest()


def future_id_of_name(name: str) -> str:
    """Return the id of the future to which the payload with this name belongs."""
    return '-'.join(name.partition('.')[0].split('-')[:2])


class NotificationKind(StrEnum):
    """Event that a notification reports."""

    ACCEPTED = 'accepted'
    """A gateway accepted a future for another gateway, which owns the lane."""
    FINISHED = 'finished'
    """A future is finished."""
    CANCELLED = 'cancelled'
    """The owner of a future should stop it."""
    LEFT = 'left'
    """A gateway released its lease; other gateways should adopt its futures."""
    MISSED = 'missed'
    """Notifications may have been lost."""


@dataclass(frozen=True, kw_only=True)
class Notification:
    """Message between the gateways on one database."""

    kind: NotificationKind
    owner: str = ''
    """Gateway that owns the future, or that released its lease."""
    tenant_id: str = ''
    future_id: str = ''
    topic: str = ''
    """Result of `topic_name` for the future's topic; empty without a topic."""


def topic_name(tenant_id: str, topic: str) -> str:
    """Return a name for a tenant's topic that differs from the ids of futures."""
    return 'topic-' + hashlib.blake2s(f'{tenant_id}\0{topic}'.encode(), digest_size=20).hexdigest()
