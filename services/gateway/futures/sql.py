"""Futures in SQL. Requests and results are not here: see `ports.PayloadStore`."""

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import replace
from datetime import datetime

from sqlalchemy import delete, func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.orm import aliased

from services.gateway.futures.news import News, NewsKind, topic_name
from services.gateway.futures.rules import Future, FutureState, FutureTaken
from services.gateway.futures.sql_peers import TAKEOVER_LOCK, WAITING, announce
from services.gateway.futures.tables import FutureRow, GatewayRow
from services.gateway.store.database import Database
from services.gateway.store.statements import as_row, fetch_all, fetch_one, insert_into, select_values
from services.kit.errors import ServiceUnreachable

_IDS_AT_ONCE = 500
"""Databases bound how many parameters one statement has."""


class SqlFutureStore:
    """Keeps futures."""

    def __init__(self, database: Database) -> None:
        """Keep them in `database`."""
        self._database = database

    async def add_if_absent(self, future: Future) -> Future:
        """Keep the future, or leave the one of that id as it is; return what is kept.

        Raises:
            ServiceUnreachable: the owner it names has lost its place, or the database does not answer.
        """
        async with self._database.write() as connection:
            owner = await _owner_of(connection, future) if future.owner else ''
            insert = insert_into(connection, FutureRow).values({**as_row(future), 'owner': owner})
            insert = insert.on_conflict_do_nothing(index_elements=['future_id']).returning(FutureRow.future_id)
            if (await connection.execute(insert)).scalar_one_or_none() is not None:
                if owner == future.owner:
                    return future
                given = replace(future, owner=owner)
                await _announce(connection, NewsKind.ACCEPTED, given)
                return given
            is_it = FutureRow.future_id == future.future_id
            return await fetch_one(connection, select_values(FutureRow, Future).where(is_it), Future) or future

    async def get(self, tenant_id: str, future_id: str) -> Future | None:
        """Return the tenant's future, or None."""
        is_it = (FutureRow.tenant_id == tenant_id) & (FutureRow.future_id == future_id)
        async with self._database.read() as connection:
            return await fetch_one(connection, select_values(FutureRow, Future).where(is_it), Future)

    async def number(self, future: Future, number: int, *, instead_of: int | None) -> int:
        """Keep what the service behind is to know a future by, where `instead_of` is kept; return what is kept.

        Raises:
            FutureTaken: it has another owner by now.
        """
        is_it = FutureRow.future_id == future.future_id
        is_mine = FutureRow.owner == future.owner
        is_free = FutureRow.number.is_(None) if instead_of is None else FutureRow.number == instead_of
        async with self._database.write() as connection:
            changed = await connection.execute(update(FutureRow).where(is_it & is_mine & is_free).values(number=number))
            if changed.rowcount:
                return number
            kept = (await connection.execute(select(FutureRow.number, FutureRow.owner).where(is_it))).one_or_none()
            if kept is not None and kept.owner != future.owner:
                raise FutureTaken
            return number if kept is None or kept.number is None else kept.number

    async def settle(self, future: Future) -> Future:
        """Keep a finished future, unless it is finished already or has another owner; return what is kept."""
        is_it = FutureRow.future_id == future.future_id
        is_mine = FutureRow.owner == future.owner
        outcome = {'state': future.state, 'finish_time': future.finish_time, 'error': future.error}
        is_waiting = FutureRow.state == FutureState.WAITING
        async with self._database.write() as connection:
            changed = await connection.execute(update(FutureRow).where(is_it & is_mine & is_waiting).values(outcome))
            if changed.rowcount:
                if future.owner:
                    await _announce(connection, NewsKind.FINISHED, future)
                return future
            return await fetch_one(connection, select_values(FutureRow, Future).where(is_it), Future) or future

    async def list_waiting(self, owner: str = '') -> Sequence[Future]:
        """Return an owner's that are not finished, by lane and position; those of no lane as they came."""
        query = select_values(FutureRow, Future).where(WAITING & (FutureRow.owner == owner))
        query = query.order_by(FutureRow.lane, FutureRow.position, FutureRow.create_time, FutureRow.future_id)
        async with self._database.read() as connection:
            return await fetch_all(connection, query, Future)

    async def next_position(self, tenant_id: str, lane: str) -> int:
        """Return the position after the last finished one of a lane; 0 where there is none."""
        is_finished = (FutureRow.lane == lane) & (FutureRow.state != FutureState.WAITING)
        query = select(func.max(FutureRow.position)).where((FutureRow.tenant_id == tenant_id) & is_finished)
        async with self._database.read() as connection:
            last = (await connection.execute(query)).scalar_one_or_none()
            return 0 if last is None else last + 1

    async def list_finished(self, *, finished_before: datetime, limit: int) -> Sequence[Future]:
        """Return some that finished before then and are not expired."""
        is_over = FutureRow.state.in_([FutureState.DONE, FutureState.FAILED])
        query = select_values(FutureRow, Future).where(is_over & (FutureRow.finish_time < finished_before))
        async with self._database.read() as connection:
            return await fetch_all(connection, query.limit(limit), Future)

    async def list_ended(self, tenant_id: str, topic: str, *, since: datetime | None, limit: int) -> Sequence[Future]:
        """Return a topic's futures that finished at `since` or later, expired ones left out, in that order."""
        is_one = (FutureRow.tenant_id == tenant_id) & (FutureRow.topic == topic)
        is_over = FutureRow.state.in_([FutureState.DONE, FutureState.FAILED])
        query = select_values(FutureRow, Future).where(is_one & is_over)
        if since is not None:
            query = query.where(FutureRow.finish_time >= since)
        query = query.order_by(FutureRow.finish_time, FutureRow.future_id).limit(limit)
        async with self._database.read() as connection:
            return await fetch_all(connection, query, Future)

    async def expire(self, future_ids: Collection[str]) -> None:
        """Mark finished futures as expired."""
        for some in _parts(future_ids):
            is_one = FutureRow.future_id.in_(some) & (FutureRow.state != FutureState.WAITING)
            async with self._database.write() as connection:
                await connection.execute(update(FutureRow).where(is_one).values(state=FutureState.EXPIRED))

    async def drop_expired(self, *, finished_before: datetime) -> int:
        """Forget expired futures that finished before then, but the last of each lane; return how many."""
        later = aliased(FutureRow)
        is_same_lane = (later.tenant_id == FutureRow.tenant_id) & (later.lane == FutureRow.lane)
        is_later = (later.position > FutureRow.position) & (later.state != FutureState.WAITING)
        has_later = select(later.future_id).where(is_same_lane & is_later).exists()
        is_over = (FutureRow.state == FutureState.EXPIRED) & (FutureRow.finish_time < finished_before)
        async with self._database.write() as connection:
            statement = delete(FutureRow).where(is_over & ((FutureRow.lane == '') | has_later))
            return (await connection.execute(statement)).rowcount

    async def find_known(self, future_ids: Collection[str]) -> Collection[str]:
        """Return those of the ids whose futures are kept and not expired."""
        found: set[str] = set()
        async with self._database.read() as connection:
            for some in _parts(future_ids):
                is_one = FutureRow.future_id.in_(some) & (FutureRow.state != FutureState.EXPIRED)
                found.update((await connection.execute(select(FutureRow.future_id).where(is_one))).scalars())
        return found


async def _owner_of(connection: AsyncConnection, future: Future) -> str:
    """Return who carries a new future out: who has the lane while something waits in it, else the one that it names.

    From then on nobody else accepts a future of the lane, and no gateway loses its place, until the transaction ends.
    """
    is_postgres = connection.dialect.name == 'postgresql'
    if is_postgres:
        locks = [func.pg_advisory_xact_lock_shared(TAKEOVER_LOCK)]
        if future.lane:
            locks.append(func.pg_advisory_xact_lock(_lock_of(future)))
        await connection.execute(select(*locks))
    is_waiting = WAITING & (FutureRow.tenant_id == future.tenant_id) & (FutureRow.lane == future.lane)
    of_lane = select(FutureRow.owner).where(is_waiting & (FutureRow.lane != '')).limit(1)
    is_there = select(GatewayRow.gateway_id).where(GatewayRow.gateway_id == future.owner).exists()
    owner, has_place = (await connection.execute(select(of_lane.scalar_subquery(), is_there))).one()
    if is_postgres and not has_place:
        raise ServiceUnreachable('gateway')
    return owner or future.owner


async def _announce(connection: AsyncConnection, kind: NewsKind, future: Future) -> None:
    if connection.dialect.name == 'postgresql':
        news = News(
            kind=kind,
            owner=future.owner,
            tenant_id=future.tenant_id,
            future_id=future.future_id,
            topic=topic_name(future.tenant_id, future.topic) if future.topic else '',
        )
        await announce(connection, news)


def _lock_of(future: Future) -> int:
    """Return the number of a lane's advisory lock."""
    digest = hashlib.blake2s(f'{future.tenant_id}\0{future.lane}'.encode(), digest_size=8).digest()
    return int.from_bytes(digest, 'big', signed=True)


def _parts(future_ids: Collection[str]) -> list[list[str]]:
    ids = list(future_ids)
    return [ids[begin : begin + _IDS_AT_ONCE] for begin in range(0, len(ids), _IDS_AT_ONCE)]
