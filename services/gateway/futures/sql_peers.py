"""Gateways that share a PostgreSQL database: their places are rows, their news are notifications.

A gateway is there while it renews its row, or at least holds the lock of its listening connection, which the server
lets go when the process dies: so the work of one that was killed is taken over after a few beats, and that of one whose
machine is gone after the lease. Whoever takes a place away deletes its row, and gets its futures in the same
transaction; `SqlFutureStore` lets nothing of a former owner through.
"""

import hashlib
import json
from collections.abc import AsyncGenerator, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import psycopg
from sqlalchemy import delete, func, insert, select, text, update
from sqlalchemy.ext.asyncio import AsyncConnection

from services.gateway.futures.news import News, NewsKind, PayloadsNotShared
from services.gateway.futures.tables import FutureRow, GatewayRow
from services.gateway.store.database import KEPT_ALIVE, Database
from services.kit.errors import ServiceUnreachable
from services.kit.ids import new_id

CHANNEL = 'twinkle_futures'
TAKEOVER_LOCK = 0x7477696E6B6C66
"""Number of the advisory lock that new futures are accepted under, shared, and that is had alone to take futures over:
no future slips in for an owner who is just losing its place."""
WAITING = text("futures.state = 'waiting'")
"""Written out, so that the index of waiting futures serves it."""


class SqlPeers:
    """Implements `ports.Peers`."""

    def __init__(
        self, database: Database, url: str, *, payload_store_id: str, silence: timedelta, lease: timedelta
    ) -> None:
        """Share `database`.

        Args:
            database: on PostgreSQL.
            url: of the same database, for a connection that listens.
            payload_store_id: tells the place of the payloads, which all must share.
            silence: after which one whose connection is gone has died.
            lease: the same, whatever its connection looks like.
        """
        self._database = database
        self._url = url
        self._payload_store_id = payload_store_id
        self._silence = silence
        self._lease = lease
        self._listener: psycopg.AsyncConnection[Any] | None = None
        """Holds the lock of a place on which nobody listens yet."""

    async def join(self) -> str:
        """Take a place and return its id.

        Raises:
            PayloadsNotShared: a gateway that is there keeps payloads in another folder.
            ServiceUnreachable: the database does not answer.
        """
        gateway_id = new_id('gw')
        # Locked before it is there, it is never taken for one that died.
        listener = await self._connect(gateway_id)
        try:
            await self._take_place(gateway_id)
        except BaseException:
            await listener.close()
            raise
        self._listener = listener
        return gateway_id

    async def renew(self, gateway_id: str) -> bool:
        """Say that the gateway is there; False: its place is lost.

        Raises:
            ServiceUnreachable: the database does not answer.
        """
        statement = update(GatewayRow).where(GatewayRow.gateway_id == gateway_id).values(heartbeat_time=_NOW)
        async with self._database.write() as connection:
            return (await connection.execute(statement)).rowcount == 1

    async def adopt(self, gateway_id: str) -> int:
        """Make the gateway the owner of all that wait and have no owner who is there; return how many they are.

        Raises:
            ServiceUnreachable: the database does not answer.
        """
        is_orphan = WAITING & FutureRow.owner.not_in(select(GatewayRow.gateway_id))
        async with self._database.read() as connection:
            orphans = await connection.execute(select(FutureRow.future_id).where(is_orphan).limit(1))
            if orphans.first() is None and not await self._dead(connection):
                return 0
        async with self._database.write() as connection:
            await connection.execute(select(func.pg_advisory_xact_lock(TAKEOVER_LOCK)))
            dead = [other for other in await self._dead(connection) if other != gateway_id]
            await connection.execute(delete(GatewayRow).where(GatewayRow.gateway_id.in_(dead)))
            is_mine = GatewayRow.gateway_id == gateway_id
            if (await connection.execute(select(GatewayRow.gateway_id).where(is_mine))).first() is None:
                return 0
            return (await connection.execute(update(FutureRow).where(is_orphan).values(owner=gateway_id))).rowcount

    async def leave(self, gateway_id: str) -> None:
        """Give a place up, and let others know.

        Raises:
            ServiceUnreachable: the database does not answer.
        """
        listener, self._listener = self._listener, None
        if listener is not None:
            await listener.close()
        async with self._database.write() as connection:
            await connection.execute(delete(GatewayRow).where(GatewayRow.gateway_id == gateway_id))
            await announce(connection, News(kind=NewsKind.LEFT, owner=gateway_id))

    async def tell(self, news: News) -> None:
        """Let all gateways know.

        Raises:
            ServiceUnreachable: the database does not answer.
        """
        async with self._database.write() as connection:
            await announce(connection, news)

    async def listen(self, gateway_id: str) -> AsyncGenerator[News, None]:
        """Yield what is told from now on; first of all, that some may have been missed.

        Raises:
            ServiceUnreachable: the connection is lost.
        """
        listener, self._listener = self._listener, None
        connection = listener or await self._connect(gateway_id)
        try:
            await connection.execute(f'LISTEN {CHANNEL}')
            yield News(kind=NewsKind.MISSED)
            async for notice in connection.notifies():
                yield _news_of(notice.payload)
        except psycopg.OperationalError as error:
            raise ServiceUnreachable('database') from error
        finally:
            await connection.close()

    async def _take_place(self, gateway_id: str) -> None:
        async with self._database.write() as connection:
            await connection.execute(select(func.pg_advisory_xact_lock(TAKEOVER_LOCK)))
            dead = await self._dead(connection)
            is_other = GatewayRow.payload_store_id != self._payload_store_id
            others = (await connection.execute(select(GatewayRow.gateway_id).where(is_other))).scalars().all()
            if set(others) - set(dead):
                raise PayloadsNotShared()
            row = {'gateway_id': gateway_id, 'payload_store_id': self._payload_store_id, 'heartbeat_time': _NOW}
            await connection.execute(insert(GatewayRow).values(row))

    async def _connect(self, gateway_id: str) -> psycopg.AsyncConnection[Any]:
        """Open a connection that holds the gateway's lock."""
        try:
            connection = await psycopg.AsyncConnection.connect(self._url, autocommit=True, **KEPT_ALIVE)
            await connection.execute('SELECT pg_try_advisory_lock(%s)', [_lock_of(gateway_id)])
        except psycopg.OperationalError as error:
            raise ServiceUnreachable('database') from error
        return connection

    async def _dead(self, connection: AsyncConnection) -> Sequence[str]:
        """Return those that are not there any more."""
        silent_for = _NOW - GatewayRow.heartbeat_time
        query = select(GatewayRow.gateway_id, silent_for > self._lease).where(silent_for > self._silence)
        dead: list[str] = []
        for other, is_lapsed in (await connection.execute(query)).all():
            # The lock is free at once when a process is killed, and let go again at the end of this transaction.
            free = select(func.pg_try_advisory_xact_lock(_lock_of(other)))
            if is_lapsed or (await connection.execute(free)).scalar_one():
                dead.append(other)
        return dead


_NOW = func.clock_timestamp()


async def announce(connection: AsyncConnection, news: News) -> None:
    """Let all gateways know, once the transaction commits."""
    await connection.execute(select(func.pg_notify(CHANNEL, json.dumps(asdict(news)))))


def _news_of(payload: str) -> News:
    facts: dict[str, Any] = json.loads(payload)
    return News(**{**facts, 'kind': NewsKind(facts['kind'])})


def _lock_of(gateway_id: str) -> int:
    """Return the number of a gateway's advisory lock."""
    digest = hashlib.blake2s(gateway_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, 'big', signed=True)
