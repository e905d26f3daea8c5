"""What gateways on one database tell each other of futures."""

import hashlib
from dataclasses import dataclass
from enum import StrEnum


class PayloadsNotShared(Exception):
    """Another gateway on the database keeps payloads in another folder: neither could read what the other accepted."""


class NewsKind(StrEnum):
    """What happened."""

    ACCEPTED = 'accepted'
    """A gateway accepted a future that another one is to carry out."""
    FINISHED = 'finished'
    """A future is finished."""
    CANCELLED = 'cancelled'
    """A future is to be stopped where it is carried out."""
    LEFT = 'left'
    """A gateway has stopped, and others are to carry on with its futures."""
    MISSED = 'missed'
    """Something may have been told that was not heard."""


@dataclass(frozen=True, kw_only=True)
class News:
    """One piece of news."""

    kind: NewsKind
    owner: str = ''
    """Who carries the future out."""
    tenant_id: str = ''
    future_id: str = ''
    topic: str = ''
    """What it is told under, by `topic_name`."""


def topic_name(tenant_id: str, topic: str) -> str:
    """Return what stands for a tenant's topic where futures have their ids."""
    return 'topic-' + hashlib.blake2s(f'{tenant_id}\0{topic}'.encode(), digest_size=20).hexdigest()
