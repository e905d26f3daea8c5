"""Gateways that share a PostgreSQL database: a row for each lease, and PostgreSQL notifications between them.

A gateway renews its row at each heartbeat. The futures of a lost machine are adopted when its lease ends. The futures
of a killed process are adopted after a few missed heartbeats, because PostgreSQL has then released the advisory lock of
its connection. The adopting gateway deletes the row and takes the futures in one transaction, and `SqlFutureStore`
rejects later writes of the previous owner.
"""

import json
from collections.abc import AsyncGenerator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from sqlalchemy import delete, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from twinkle_services.gateway.futures.rules import Notification, NotificationKind, PayloadsNotShared
from twinkle_services.gateway.futures.sql import CHANNEL, TAKEOVER_LOCK, WAITING, FutureRow, GatewayRow, announce
from twinkle_services.gateway.store.base import lock_key
from twinkle_services.gateway.store.database import KEEPALIVE_OPTIONS, Database
from twinkle_services.kit.errors import ServiceUnreachable
from twinkle_services.kit.ids import new_id

if TYPE_CHECKING:
    import psycopg

_NOW = func.clock_timestamp()


class SqlPeers:
    """Leases of the gateways on one PostgreSQL database, and notifications between them.

    A gateway counts as dead after `lease` without a heartbeat, or after `silence` if it has also lost the listening
    connection that it opened to `url`. All gateways must share the payload folder with the id `payload_store_id`. A
    gateway without a lease cannot change futures.

    Every method raises ServiceUnreachable if the database does not respond.
    """

    def __init__(
        self, database: Database, url: str, *, payload_store_id: str, silence: timedelta, lease: timedelta
    ) -> None:
        self._database = database
        self._url = url
        self._payload_store_id = payload_store_id
        self._silence = silence
        self._lease = lease
        self._listener: psycopg.AsyncConnection[Any] | None = None
        """Connection that holds the advisory lock of the lease until `listen` uses the connection."""

    async def join(self) -> str:
        """Acquire a lease and return its id, which is the owner of this gateway's futures.

        Raises:
            PayloadsNotShared: a live gateway stores payloads in a different folder.
        """
        gateway_id = new_id('gw')
        # The lock is acquired before the row exists, so that no other gateway considers this one dead.
        listener = await self._connect(gateway_id)
        try:
            await self._insert_lease(gateway_id)
        except BaseException:
            await listener.close()
            raise
        self._listener = listener
        return gateway_id

    async def renew(self, gateway_id: str) -> bool:
        """Renew the lease; return False if it is lost."""
        statement = update(GatewayRow).where(GatewayRow.gateway_id == gateway_id).values(heartbeat_time=_NOW)
        async with self._database.write() as connection:
            return (await connection.execute(statement)).rowcount == 1

    async def adopt(self, gateway_id: str) -> int:
        """Delete dead leases, and give the gateway all waiting futures without a live owner; return their number."""
        is_orphan = WAITING & FutureRow.owner.not_in(select(GatewayRow.gateway_id))
        async with self._database.read() as connection:
            orphans = await connection.execute(select(FutureRow.future_id).where(is_orphan).limit(1))
            if orphans.first() is None and not await self._dead(connection):
                return 0
        async with self._database.write() as connection:
            await connection.execute(select(func.pg_advisory_xact_lock(TAKEOVER_LOCK)))
            dead = [other for other in await self._dead(connection) if other != gateway_id]
            await connection.execute(delete(GatewayRow).where(GatewayRow.gateway_id.in_(dead)))
            is_this_gateway = GatewayRow.gateway_id == gateway_id
            if (await connection.execute(select(GatewayRow.gateway_id).where(is_this_gateway))).first() is None:
                return 0
            return (await connection.execute(update(FutureRow).where(is_orphan).values(owner=gateway_id))).rowcount

    async def leave(self, gateway_id: str) -> None:
        """Release the lease and notify the other gateways."""
        listener, self._listener = self._listener, None
        if listener is not None:
            await listener.close()
        async with self._database.write() as connection:
            await connection.execute(delete(GatewayRow).where(GatewayRow.gateway_id == gateway_id))
            await announce(connection, Notification(kind=NotificationKind.LEFT, owner=gateway_id))

    async def notify(self, notification: Notification) -> None:
        async with self._database.write() as connection:
            await announce(connection, notification)

    async def listen(self, gateway_id: str) -> AsyncGenerator[Notification, None]:
        """Yield the notifications from now on, including those of this gateway; the first is MISSED.

        Raises:
            ServiceUnreachable: the connection is lost.
        """
        listener, self._listener = self._listener, None
        connection = listener or await self._connect(gateway_id)
        try:
            await connection.execute(f'LISTEN {CHANNEL}')
            yield Notification(kind=NotificationKind.MISSED)
            async for message in connection.notifies():
                yield _notification_of(message.payload)
        except _driver().OperationalError as error:
            raise ServiceUnreachable('database') from error
        finally:
            await connection.close()

    async def _insert_lease(self, gateway_id: str) -> None:
        async with self._database.write() as connection:
            await connection.execute(select(func.pg_advisory_xact_lock(TAKEOVER_LOCK)))
            dead = await self._dead(connection)
            is_other = GatewayRow.payload_store_id != self._payload_store_id
            others = (await connection.execute(select(GatewayRow.gateway_id).where(is_other))).scalars().all()
            if set(others) - set(dead):
                raise PayloadsNotShared()
            row = {'gateway_id': gateway_id, 'payload_store_id': self._payload_store_id, 'heartbeat_time': _NOW}
            await connection.execute(insert(GatewayRow).values(row))

    async def _connect(self, gateway_id: str) -> 'psycopg.AsyncConnection[Any]':
        """Open a connection that holds the gateway's advisory lock."""
        try:
            connection = await _driver().AsyncConnection.connect(self._url, autocommit=True, **KEEPALIVE_OPTIONS)
            await connection.execute('SELECT pg_try_advisory_lock(%s)', [lock_key(gateway_id)])
        except _driver().OperationalError as error:
            raise ServiceUnreachable('database') from error
        return connection

    async def _dead(self, connection: AsyncConnection) -> Sequence[str]:
        silent_for = _NOW - GatewayRow.heartbeat_time
        query = select(GatewayRow.gateway_id, silent_for > self._lease).where(silent_for > self._silence)
        dead: list[str] = []
        for other, is_expired in (await connection.execute(query)).all():
            # The lock of a killed process can be acquired immediately; it is released at the end of this transaction.
            free = select(func.pg_try_advisory_xact_lock(lock_key(other)))
            if is_expired or (await connection.execute(free)).scalar_one():
                dead.append(other)
        return dead


def _notification_of(payload: str) -> Notification:
    facts: dict[str, Any] = json.loads(payload)
    return Notification(**{**facts, 'kind': NotificationKind(facts['kind'])})


def _driver() -> Any:
    import psycopg  # noqa: PLC0415 - takes 6 MB, and gateways on SQLite do not need it

    return psycopg
