"""Takeover of the futures of gateways that crashed or stopped, and the lease that shows that this gateway runs."""

import asyncio
from contextlib import aclosing, suppress
from datetime import timedelta
from typing import Never

import structlog

from twinkle_services.gateway.futures.futures import Futures
from twinkle_services.gateway.futures.rules import NotificationKind
from twinkle_services.gateway.futures.sql_peers import SqlPeers
from twinkle_services.kit.errors import DomainError
from twinkle_services.kit.retry import Retry

_STABLE_SECONDS = 60.0
"""A notification connection that lasted this long resets the back-off."""
_POLL_HEARTBEATS = 10
"""Number of heartbeats between polls for missed work, in case a notification was lost."""

_log = structlog.get_logger('peers')


class GatewayLease:
    """Joins the gateways, renews the lease every `heartbeat`, rejoins after losing it, and adopts orphaned futures.

    Concurrency: one task runs `run`, between `join` and `leave`.
    """

    def __init__(self, peers: SqlPeers, futures: Futures, retry: Retry, *, heartbeat: timedelta) -> None:
        self._peers = peers
        self._futures = futures
        self._back_off = retry.back_off
        self._heartbeat_seconds = heartbeat.total_seconds()
        self._gateway_id = ''
        self._listening: asyncio.Task[Never] | None = None

    async def join(self) -> None:
        """Acquire the lease; from now on futures can be accepted.

        Raises:
            PayloadsNotShared: another gateway on the database stores payloads in a different folder.
            ServiceUnreachable: the database does not respond.
        """
        self._gateway_id = await self._peers.join()
        await self._futures.restart_as(self._gateway_id)

    async def leave(self) -> None:
        """Release the lease, so that other gateways adopt the remaining futures.

        If the database is unreachable, the lease expires later.
        """
        with suppress(DomainError):
            await self._peers.leave(self._gateway_id)

    async def run(self) -> Never:
        """Renew the lease and handle notifications until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            heartbeats, failures = 0, 0
            while True:
                if self._listening is None or self._listening.done():
                    self._listening = tasks.create_task(self._listen(self._gateway_id))
                try:
                    await self._heartbeat(is_poll=heartbeats % _POLL_HEARTBEATS == 0)
                    failures = 0
                except DomainError as error:
                    _log.info('gateway lease not renewed; retrying', reason=error.reason)
                    await self._back_off(failures)
                    failures += 1
                heartbeats += 1
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._futures.is_disowned.wait(), self._heartbeat_seconds)

    async def _heartbeat(self, *, is_poll: bool) -> None:
        is_renewed = not self._futures.is_disowned.is_set() and await self._peers.renew(self._gateway_id)
        if not is_renewed:
            await self._rejoin()
        if await self._peers.adopt(self._gateway_id) or is_poll or not is_renewed:
            await self._futures.resume()

    async def _rejoin(self) -> None:
        """Join under a new id. The futures of the previous id are adopted by other gateways or by this one."""
        _log.warning('gateway lease lost; rejoining', gateway=self._gateway_id)
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.wait([self._listening])
        # The lease still exists if another gateway has taken over a single future only.
        await self._peers.leave(self._gateway_id)
        await self.join()

    async def _listen(self, gateway_id: str) -> Never:
        loop = asyncio.get_running_loop()
        failures = 0
        while True:
            start = loop.time()
            try:
                await self._handle_all(gateway_id)
            except DomainError as error:
                _log.info('notification connection failed; retrying', reason=error.reason)
            failures = 0 if loop.time() - start > _STABLE_SECONDS else failures + 1
            await self._back_off(failures)

    async def _handle_all(self, gateway_id: str) -> None:
        async with aclosing(self._peers.listen(gateway_id)) as notifications:
            async for notification in notifications:
                if notification.kind is NotificationKind.LEFT and await self._peers.adopt(gateway_id):
                    await self._futures.resume()
                await self._futures.handle(notification)
