"""Futures: requests that were accepted and answered with an id, and whose outcome is fetched later.

A future is durable before its id is told. Those of one lane are carried out strictly in the order of
their positions, whatever order they came in (`domain.lane`); those of no lane run as they come.
"""

import hashlib
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum

from services.kit.errors import DomainError, RequestIdReused

NOTE_LENGTH = 4096
"""Most characters of a note."""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Upper bounds of a resource that tenants share."""

    per_tenant: int
    total: int


class FutureTaken(Exception):
    """Another gateway carries the future out now: this one was taken for dead. What it does to it has no effect."""


class FutureState(StrEnum):
    """How far a future is."""

    WAITING = 'waiting'
    """Accepted: it waits for its turn, or is being carried out."""
    DONE = 'done'
    FAILED = 'failed'
    EXPIRED = 'expired'
    """It was finished so long ago that its result is no longer kept."""


@dataclass(frozen=True, kw_only=True)
class FutureRequest:
    """What is asked to be carried out."""

    kind: str
    """Names who carries it out, such as 'execute'."""
    key: str
    """Tells it from every other one of the tenant: a repeat with the same key is the same future."""
    payload: bytes
    """The request, opaque here; kept outside the database until the future is finished. Serialise it so that the
    same request always has the same bytes."""
    session_id: str
    """The session that asked; empty for none."""
    lane: str = ''
    """What it takes its turn in, such as an adapter's id; empty: it runs at once."""
    position: int = 0
    """Counts from 0 without gaps within the lane; without a lane it means nothing."""
    note: str = ''
    """What the API needs to tell the outcome, at most `NOTE_LENGTH` characters; kept as long as the future."""
    is_note_free: bool = False
    """Whether a repeat may come with another note; that of the first is kept."""
    topic: str = ''
    """What its end is told under to whoever follows many futures at once; empty: nobody does."""
    base_model: str = ''
    """The base model that carries it out, among whose futures it waits for a place; empty: none, or not known."""


@dataclass(frozen=True, kw_only=True)
class Future:
    """An accepted request."""

    future_id: str
    """Derived from tenant and key, so that a repeat finds it: see `future_id_of`."""
    tenant_id: str
    session_id: str
    kind: str
    key: str
    lane: str
    position: int
    note: str
    fingerprint: str
    """Digest of what was asked."""
    state: FutureState
    create_time: datetime
    """UTC."""
    number: int | None = None
    """What the service behind knows it by, such as an operation's sequence number; None before it was sent."""
    finish_time: datetime | None = None
    """UTC; None while it waits."""
    error: DomainError | None = None
    """Why it failed."""
    topic: str = ''
    """As in the order."""
    base_model: str = ''
    """As in the order."""

    owner: str = ''
    """The gateway that carries it out, of several on one database; empty: there is but one."""

    @classmethod
    def accepted(cls, order: FutureRequest, *, tenant_id: str, moment: datetime) -> 'Future':
        """Return the future of an order that was just accepted."""
        return cls(
            future_id=future_id_of(tenant_id, order.key),
            tenant_id=tenant_id,
            session_id=order.session_id,
            kind=order.kind,
            key=order.key,
            lane=order.lane,
            position=order.position,
            note=order.note,
            fingerprint=fingerprint_of(order),
            state=FutureState.WAITING,
            create_time=moment,
            topic=order.topic,
            base_model=order.base_model,
        )

    @property
    def is_finished(self) -> bool:
        """Whether its outcome is known, or was."""
        return self.state is not FutureState.WAITING

    @property
    def payload_name(self) -> str:
        """What its request is kept under. One of other content has another, so that it replaces nothing."""
        return f'{self.future_id}-{self.fingerprint[:16]}.request'

    @property
    def result_name(self) -> str:
        """What its result is kept under. A gateway that lost the future to another one replaces nothing of that's."""
        if not self.owner:
            return f'{self.future_id}.result'
        mark = hashlib.blake2s(f'{self.future_id}{self.owner}'.encode(), digest_size=8).hexdigest()
        return f'{self.future_id}-{mark}.result'

    def done(self, *, moment: datetime) -> 'Future':
        """Return it with its result kept."""
        return replace(self, state=FutureState.DONE, finish_time=moment)

    def failed(self, error: DomainError, *, moment: datetime) -> 'Future':
        """Return it with why it failed."""
        return replace(self, state=FutureState.FAILED, finish_time=moment, error=error)

    def check_repeat(self, fingerprint: str) -> None:
        """Check that a repeat asks for the same.

        Raises:
            RequestIdReused: it does not.
        """
        if fingerprint != self.fingerprint:
            raise RequestIdReused(self.key)


def future_id_of(tenant_id: str, key: str) -> str:
    """Return the id of a tenant's future with that key, accepted or not."""
    return 'fu-' + hashlib.blake2s(f'{tenant_id}\0{key}'.encode(), digest_size=20).hexdigest()


def fingerprint_of(order: FutureRequest) -> str:
    """Return a digest of all that an order asks for."""
    digest = hashlib.blake2b(digest_size=20)
    note = '' if order.is_note_free else order.note
    head = (order.kind, order.key, order.lane, str(order.position), note)
    digest.update('\0'.join(head).encode())
    digest.update(b'\0')
    digest.update(order.payload)
    return digest.hexdigest()


def future_id_of_name(name: str) -> str:
    """Return the future that a payload or a result of that name belongs to."""
    return '-'.join(name.partition('.')[0].split('-')[:2])
