"""Being part of the fleet: this sampler reports to its gateways for as long as it lives, and heeds what they want."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from datetime import timedelta

import structlog

from services.kit.errors import DomainError
from services.sampler.domain.fleet import ReplicaReport, Welcome, Wish
from services.sampler.ports import FleetGateway

_log = structlog.get_logger('fleet')

REPORTS_PER_LEASE = 3
"""So many reports may be lost, less one, before a lease ends."""
LEAST_PAUSE = timedelta(milliseconds=50)
"""Between two reports: what changes faster is told together."""
_FIRST_RETRY_SECONDS = 0.1
_LONGEST_RETRY_SECONDS = 5.0
_TOLD_SECONDS = 2.0
"""How long the end of this process waits for gateways to know of it."""


class _Lease:
    """The lease at one gateway: what is still to be told there."""

    def __init__(self, gateway: FleetGateway) -> None:
        self.gateway = gateway
        self.interval = timedelta(seconds=1)
        self.news = asyncio.Event()
        self.told = asyncio.Event()
        """Set while the gateway has answered a report that says that this sampler leaves."""
        self.is_lost = False
        self.pause = _FIRST_RETRY_SECONDS
        """Until the gateway is called again once the lease is lost."""


class Membership:
    """Keeps a lease at each gateway; one that is away is called again and again.

    Concurrency: for one event loop.
    """

    def __init__(
        self,
        gateways: Sequence[FleetGateway],
        *,
        report: Callable[[bool], ReplicaReport],
        use_checkpoint: Callable[[str], None],
        use_relay: Callable[[str], None],
        most_interval: timedelta,
    ) -> None:
        """Report to `gateways`.

        Args:
            gateways: all of the deployment's.
            report: returns how this sampler stands; it is given whether it drains.
            use_checkpoint: takes the address of the deployment's checkpoint service.
            use_relay: takes the address of the sampler to take weights from, or an empty one.
            most_interval: report at least this often, whatever a gateway says.
        """
        self._leases = [_Lease(gateway) for gateway in gateways]
        self._report = report
        self._use_checkpoint = use_checkpoint
        self._use_relay = use_relay
        self._most_interval = most_interval
        self._tasks: list[asyncio.Task[None]] = []
        self._is_draining = False
        self.drain_requested = asyncio.Event()
        """Set once a gateway has asked this sampler to leave."""

    def start(self) -> None:
        """Begin to report."""
        self._tasks = [asyncio.create_task(self._keep(lease), name='lease') for lease in self._leases]

    def note_change(self) -> None:
        """Have what is held now told soon."""
        for lease in self._leases:
            lease.news.set()

    async def drain(self) -> None:
        """Tell every gateway that this sampler leaves; return when those that can be reached know."""
        self._is_draining = True
        self.note_change()
        waiting = [asyncio.ensure_future(lease.told.wait()) for lease in self._leases if not lease.is_lost]
        if waiting:
            _, pending = await asyncio.wait(waiting, timeout=_TOLD_SECONDS)
            for wait in pending:
                wait.cancel()

    async def close(self) -> None:
        """Report no more: the fleet forgets this sampler."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    @asynccontextmanager
    async def serving(
        self, stopping: asyncio.Event, wait_idle: Callable[[], Awaitable[None]]
    ) -> AsyncGenerator[None, None]:
        """Be part of the fleet within this block; at its end the gateways know that this sampler leaves.

        Args:
            stopping: set when a gateway wanted this sampler to leave and nothing runs here any more.
            wait_idle: returns an awaitable of the moment when nothing runs.
        """
        self.start()
        watch = asyncio.create_task(self._leave_when_asked(stopping, wait_idle), name='watch for drains')
        try:
            yield
        finally:
            watch.cancel()
            await self.drain()

    async def _leave_when_asked(self, stopping: asyncio.Event, wait_idle: Callable[[], Awaitable[None]]) -> None:
        await self.drain_requested.wait()
        _log.info('leaving the fleet, as it was asked for')
        await self.drain()
        await wait_idle()
        stopping.set()

    async def _keep(self, lease: _Lease) -> None:
        """Take the lease again whenever it is lost, for whatever reason: without it a sampler gets nothing to do."""
        while True:
            holding = asyncio.create_task(self._hold(lease), name=f'hold a lease of {lease.gateway.address}')
            try:
                await asyncio.wait([holding])
            finally:
                holding.cancel()
            error = None if holding.cancelled() else holding.exception()
            if error is not None:
                self._note_loss(lease, error)
            await asyncio.sleep(lease.pause)
            lease.pause = min(2 * lease.pause, _LONGEST_RETRY_SECONDS)

    async def _hold(self, lease: _Lease) -> None:
        self._welcome(lease, await lease.gateway.register(self._report(self._is_draining)))
        # Reports of a lease that has ended would take the news from those of the next one.
        async with (
            aclosing(self._reports(lease)) as reports,
            aclosing(lease.gateway.lease(reports)) as wishes,
        ):
            async for wish in wishes:
                lease.pause = _FIRST_RETRY_SECONDS
                self._heed(lease, wish)

    async def _reports(self, lease: _Lease) -> AsyncGenerator[ReplicaReport, None]:
        """Yield a report now, then on every change, and in any case before the lease ends."""
        while True:
            lease.news.clear()
            yield self._report(self._is_draining)
            await asyncio.sleep(LEAST_PAUSE.total_seconds())
            left = lease.interval - LEAST_PAUSE
            try:
                async with asyncio.timeout(max(left.total_seconds(), 0.0)):
                    await lease.news.wait()
            except TimeoutError:
                continue

    def _welcome(self, lease: _Lease, welcome: Welcome) -> None:
        lease.is_lost = False
        lease.interval = min(welcome.lease, self._most_interval) / REPORTS_PER_LEASE
        if welcome.checkpoint_address:
            self._use_checkpoint(welcome.checkpoint_address)
        _log.info('joined a fleet', gateway=lease.gateway.address)

    def _heed(self, lease: _Lease, wish: Wish) -> None:
        lease.interval = min(wish.lease, self._most_interval) / REPORTS_PER_LEASE
        self._use_relay(wish.weight_source_address)
        if wish.is_drain_requested:
            # A gateway answers each report: this one it has answered knowing that this sampler leaves.
            if self._is_draining:
                lease.told.set()
            self.drain_requested.set()

    def _note_loss(self, lease: _Lease, error: BaseException) -> None:
        if not isinstance(error, DomainError):
            _log.error('a lease broke', gateway=lease.gateway.address, exc_info=error)
        elif not lease.is_lost:
            _log.warning('a gateway is away; it is called again', gateway=lease.gateway.address, error=str(error))
        lease.is_lost = True
