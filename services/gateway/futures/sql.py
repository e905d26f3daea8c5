"""Tables and store of futures, and the notifications of their changes.

Requests and results are not in the database; see `ports.PayloadStore`.
"""

import json
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import datetime
from typing import Any

from sqlalchemy import Index, Select, String, delete, func, literal_column, select, text, update
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.orm import Mapped, aliased, mapped_column

from twinkle_services.gateway.errors import StoredRowDamaged
from twinkle_services.gateway.futures.rules import (
    Future,
    FutureState,
    FutureTaken,
    Notification,
    NotificationKind,
    topic_name,
)
from twinkle_services.gateway.store.base import (
    Base,
    EnumName,
    ErrorStatus,
    SqlStore,
    as_row,
    fetch_one,
    insert_into,
    lock_key,
    select_values,
)
from twinkle_services.kit.errors import DomainError, ServiceUnreachable

CHANNEL = 'twinkle_futures'
"""PostgreSQL channel of the notifications."""
TAKEOVER_LOCK = 0x7477696E6B6C66
"""Key of an advisory lock: shared while a future is accepted, exclusive while futures are taken over. No future is
therefore accepted for an owner that is losing its lease."""
WAITING = text("futures.state = 'waiting'")
"""Literal condition, so that the partial index of waiting futures applies."""
_IDS_AT_ONCE = 500
"""Maximum number of ids per statement, because databases limit the number of parameters."""
_IS_WAITING = text("state = 'waiting'")


class FutureRow(Base):
    """Table of futures; their requests and results are payload files."""

    __tablename__ = 'futures'
    __table_args__ = (
        Index('ix_futures_lane', 'tenant_id', 'lane', 'position'),
        Index('ix_futures_state', 'state', 'finish_time'),
        Index('ix_futures_topic', 'tenant_id', 'topic', 'finish_time'),
        Index(
            'ix_futures_waiting', 'tenant_id', 'lane', 'owner', postgresql_where=_IS_WAITING, sqlite_where=_IS_WAITING
        ),
    )
    future_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    tenant_id: Mapped[str]
    session_id: Mapped[str]
    kind: Mapped[str]
    key: Mapped[str]
    lane: Mapped[str]
    position: Mapped[int]
    note: Mapped[str]
    fingerprint: Mapped[str]
    state: Mapped[FutureState] = mapped_column(EnumName(FutureState))
    create_time: Mapped[datetime]
    number: Mapped[int | None]
    finish_time: Mapped[datetime | None]
    error: Mapped[DomainError | None] = mapped_column(ErrorStatus)
    topic: Mapped[str] = mapped_column(server_default='')
    base_model: Mapped[str] = mapped_column(server_default='')
    owner: Mapped[str] = mapped_column(String(64), server_default='')


class GatewayRow(Base):
    """Table of the live gateways on a database that several gateways share."""

    __tablename__ = 'gateways'
    gateway_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    payload_store_id: Mapped[str] = mapped_column(String(64))
    heartbeat_time: Mapped[datetime]
    """Time of the last heartbeat, by the database's clock."""


class SqlFutureStore(SqlStore):
    """Implements `ports.FutureStore`."""

    async def add_if_absent(self, future: Future) -> Future:
        async with self._database.write() as connection:
            owner = await _owner_of(connection, future) if future.owner else ''
            insert = insert_into(connection, FutureRow).values({**as_row(future), 'owner': owner})
            insert = insert.on_conflict_do_nothing(index_elements=['future_id']).returning(FutureRow.future_id)
            if (await connection.execute(insert)).scalar_one_or_none() is not None:
                if owner == future.owner:
                    return future
                owned = replace(future, owner=owner)
                await _announce(connection, NotificationKind.ACCEPTED, owned)
                return owned
            is_future = FutureRow.future_id == future.future_id
            return await fetch_one(connection, select_values(FutureRow, Future).where(is_future), Future) or future

    async def get(self, tenant_id: str, future_id: str) -> Future | None:
        is_future = (FutureRow.tenant_id == tenant_id) & (FutureRow.future_id == future_id)
        return await self._fetch_one(select_values(FutureRow, Future).where(is_future), Future)

    async def number(self, future: Future, number: int, *, instead_of: int | None) -> int:
        is_future = FutureRow.future_id == future.future_id
        is_owned = FutureRow.owner == future.owner
        is_free = FutureRow.number.is_(None) if instead_of is None else FutureRow.number == instead_of
        numbered = update(FutureRow).where(is_future & is_owned & is_free).values(number=number)
        async with self._database.write() as connection:
            if (await connection.execute(numbered)).rowcount:
                return number
            query = select(FutureRow.number, FutureRow.owner).where(is_future)
            stored = (await connection.execute(query)).one_or_none()
            if stored is not None and stored.owner != future.owner:
                raise FutureTaken
            return number if stored is None or stored.number is None else stored.number

    async def settle(self, future: Future) -> Future:
        is_future = FutureRow.future_id == future.future_id
        is_owned = FutureRow.owner == future.owner
        is_waiting = FutureRow.state == FutureState.WAITING
        outcome = {'state': future.state, 'finish_time': future.finish_time, 'error': future.error}
        settled = update(FutureRow).where(is_future & is_owned & is_waiting).values(outcome)
        async with self._database.write() as connection:
            if (await connection.execute(settled)).rowcount:
                if future.owner:
                    await _announce(connection, NotificationKind.FINISHED, future)
                return future
            return await fetch_one(connection, select_values(FutureRow, Future).where(is_future), Future) or future

    async def list_waiting(self, owner: str = '') -> Sequence[Future]:
        query = select_values(FutureRow, Future).where(WAITING & (FutureRow.owner == owner))
        query = query.order_by(FutureRow.lane, FutureRow.position, FutureRow.create_time, FutureRow.future_id)
        try:
            return await self._fetch_all(query, Future)
        except StoredRowDamaged:
            return await self._undamaged(query)

    async def _undamaged(self, query: Select[Any]) -> Sequence[Future]:
        """Return the futures of a query whose rows can be read."""
        row_id, found = literal_column('futures.rowid'), list[Future]()
        async with self._database.read() as connection:
            row_ids = (await connection.execute(query.with_only_columns(row_id))).scalars().all()
        for number in row_ids:
            # The error is logged.
            with suppress(StoredRowDamaged):
                found += await self._fetch_all(query.where(row_id == number), Future)
        return found

    async def list_of_session(self, tenant_id: str, session_id: str) -> Sequence[Future]:
        is_of_session = (FutureRow.tenant_id == tenant_id) & (FutureRow.session_id == session_id)
        return await self._fetch_all(select_values(FutureRow, Future).where(WAITING & is_of_session), Future)

    async def next_position(self, tenant_id: str, lane: str) -> int:
        is_finished = (FutureRow.lane == lane) & (FutureRow.state != FutureState.WAITING)
        query = select(func.max(FutureRow.position)).where((FutureRow.tenant_id == tenant_id) & is_finished)
        async with self._database.read() as connection:
            last = (await connection.execute(query)).scalar_one_or_none()
            return 0 if last is None else last + 1

    async def list_finished(self, *, finished_before: datetime, limit: int) -> Sequence[Future]:
        is_finished = FutureRow.state.in_([FutureState.DONE, FutureState.FAILED])
        query = select_values(FutureRow, Future).where(is_finished & (FutureRow.finish_time < finished_before))
        return await self._fetch_all(query.limit(limit), Future)

    async def list_by_topic(
        self, tenant_id: str, topic: str, *, since: datetime | None, limit: int
    ) -> Sequence[Future]:
        is_one = (FutureRow.tenant_id == tenant_id) & (FutureRow.topic == topic)
        is_finished = FutureRow.state.in_([FutureState.DONE, FutureState.FAILED])
        query = select_values(FutureRow, Future).where(is_one & is_finished)
        if since is not None:
            query = query.where(FutureRow.finish_time >= since)
        query = query.order_by(FutureRow.finish_time, FutureRow.future_id).limit(limit)
        return await self._fetch_all(query, Future)

    async def expire(self, future_ids: Collection[str]) -> None:
        for chunk in _chunks(future_ids):
            is_one = FutureRow.future_id.in_(chunk) & (FutureRow.state != FutureState.WAITING)
            await self._execute(update(FutureRow).where(is_one).values(state=FutureState.EXPIRED))

    async def drop_expired(self, *, finished_before: datetime) -> int:
        later = aliased(FutureRow)
        is_same_lane = (later.tenant_id == FutureRow.tenant_id) & (later.lane == FutureRow.lane)
        is_later = (later.position > FutureRow.position) & (later.state != FutureState.WAITING)
        has_later = select(later.future_id).where(is_same_lane & is_later).exists()
        is_finished = (FutureRow.state == FutureState.EXPIRED) & (FutureRow.finish_time < finished_before)
        return await self._execute(delete(FutureRow).where(is_finished & ((FutureRow.lane == '') | has_later)))

    async def find_known(self, future_ids: Collection[str]) -> Collection[str]:
        found: set[str] = set()
        async with self._database.read() as connection:
            for chunk in _chunks(future_ids):
                is_one = FutureRow.future_id.in_(chunk) & (FutureRow.state != FutureState.EXPIRED)
                found.update((await connection.execute(select(FutureRow.future_id).where(is_one))).scalars())
        return found


async def _owner_of(connection: AsyncConnection, future: Future) -> str:
    """Return the owner of the futures that wait in a new future's lane, or else the owner that the new future names.

    With PostgreSQL, no other gateway accepts a future of the lane or takes over futures until the transaction ends.
    """
    is_postgres = connection.dialect.name == 'postgresql'
    if is_postgres:
        locks = [func.pg_advisory_xact_lock_shared(TAKEOVER_LOCK)]
        if future.lane:
            locks.append(func.pg_advisory_xact_lock(lock_key(f'{future.tenant_id}\0{future.lane}')))
        await connection.execute(select(*locks))
    is_waiting = WAITING & (FutureRow.tenant_id == future.tenant_id) & (FutureRow.lane == future.lane)
    of_lane = select(FutureRow.owner).where(is_waiting & (FutureRow.lane != '')).limit(1)
    is_live = select(GatewayRow.gateway_id).where(GatewayRow.gateway_id == future.owner).exists()
    owner, has_lease = (await connection.execute(select(of_lane.scalar_subquery(), is_live))).one()
    if is_postgres and not has_lease:
        raise ServiceUnreachable('gateway')
    return owner or future.owner


async def announce(connection: AsyncConnection, notification: Notification) -> None:
    """Notify all gateways when the transaction commits."""
    await connection.execute(select(func.pg_notify(CHANNEL, json.dumps(asdict(notification)))))


async def _announce(connection: AsyncConnection, kind: NotificationKind, future: Future) -> None:
    if connection.dialect.name == 'postgresql':
        notification = Notification(
            kind=kind,
            owner=future.owner,
            tenant_id=future.tenant_id,
            future_id=future.future_id,
            topic=topic_name(future.tenant_id, future.topic) if future.topic else '',
        )
        await announce(connection, notification)


def _chunks(future_ids: Collection[str]) -> list[list[str]]:
    ids = list(future_ids)
    return [ids[begin : begin + _IDS_AT_ONCE] for begin in range(0, len(ids), _IDS_AT_ONCE)]
