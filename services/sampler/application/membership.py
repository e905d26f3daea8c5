"""Membership in the fleet: reports to every gateway, renews each lease, and follows the gateways' instructions."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from datetime import timedelta

import structlog

from twinkle_services.kit.errors import DomainError
from twinkle_services.sampler.domain.fleet import LeaseRenewal, Registration, ReplicaReport
from twinkle_services.sampler.ports import FleetGateway

_log = structlog.get_logger('fleet')

REPORTS_PER_LEASE = 3
"""Number of reports within one lease interval; a lease stays valid if at least one of them arrives."""
MIN_REPORT_INTERVAL = timedelta(milliseconds=50)
"""Minimum time between two reports; changes within this time are reported together."""
_FIRST_RETRY_SECONDS = 0.1
_MAX_RETRY_SECONDS = 5.0
_DRAIN_TIMEOUT_SECONDS = 2.0
"""Maximum time that shutdown waits for gateways to acknowledge the drain."""


class _Lease:
    """State of the lease with one gateway."""

    def __init__(self, gateway: FleetGateway) -> None:
        self.gateway = gateway
        self.report_interval = timedelta(seconds=1)
        self.changed = asyncio.Event()
        """Set when a report must be sent before the interval has elapsed."""
        self.drain_settled = asyncio.Event()
        """Set once the gateway has acknowledged a report that announces the drain, or the lease has ended."""
        self.is_held = False
        """Whether the gateway has granted the lease, and the lease has not ended."""
        self.is_lost = False
        """Whether the last call failed. Only the first failure in a row is logged."""
        self.retry_seconds = _FIRST_RETRY_SECONDS
        """Time to wait before calling the gateway again after the lease is lost."""


class Membership:
    """Maintains a lease with each gateway, and retries gateways that cannot be reached.

    Concurrency: use it from one event loop only.
    """

    def __init__(
        self,
        gateways: Sequence[FleetGateway],
        *,
        report: Callable[[bool], ReplicaReport],
        use_checkpoint: Callable[[str], None],
        use_relay: Callable[[str], None],
        max_interval: timedelta,
    ) -> None:
        """Create a membership; `start` begins to report.

        Args:
            gateways: All gateways of the deployment.
            report: Returns the current state of this sampler, given whether it is draining.
            use_checkpoint: Receives the address of the deployment's checkpoint service.
            use_relay: Receives the address of the sampler from which to fetch weights; empty for the checkpoint
                service.
            max_interval: Maximum lease interval; a longer interval set by a gateway is reduced to this value.
        """
        self._leases = [_Lease(gateway) for gateway in gateways]
        self._report = report
        self._use_checkpoint = use_checkpoint
        self._use_relay = use_relay
        self._max_interval = max_interval
        self._tasks: list[asyncio.Task[None]] = []
        self._is_draining = False
        self.drain_requested = asyncio.Event()
        """Set once a gateway has requested that this sampler leave the fleet."""

    def start(self) -> None:
        """Start reporting to every gateway."""
        self._tasks = [asyncio.create_task(self._maintain(lease), name='lease') for lease in self._leases]

    def report_soon(self) -> None:
        """Send the next report before the interval has elapsed."""
        for lease in self._leases:
            lease.changed.set()

    async def drain(self) -> None:
        """Announce to every gateway that this sampler leaves, and wait until those that granted a lease acknowledge it.

        The wait ends after two seconds at the latest.
        """
        self._is_draining = True
        self.report_soon()
        held = [lease for lease in self._leases if lease.is_held]
        waiting = [asyncio.ensure_future(lease.drain_settled.wait()) for lease in held]
        if waiting:
            _, pending = await asyncio.wait(waiting, timeout=_DRAIN_TIMEOUT_SECONDS)
            for task in pending:
                task.cancel()

    async def close(self) -> None:
        """Stop reporting; the gateways drop this sampler when its leases expire."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    @asynccontextmanager
    async def serving(
        self, stopping: asyncio.Event, wait_idle: Callable[[], Awaitable[None]]
    ) -> AsyncGenerator[None, None]:
        """Join the fleet within this block, and drain at its end.

        Args:
            stopping: Event that is set after a gateway has requested a drain and all running requests are done.
            wait_idle: Waits until no request runs.
        """
        self.start()
        watch = asyncio.create_task(self._leave_on_request(stopping, wait_idle), name='watch for drains')
        try:
            yield
        finally:
            watch.cancel()
            await self.drain()

    async def _leave_on_request(self, stopping: asyncio.Event, wait_idle: Callable[[], Awaitable[None]]) -> None:
        await self.drain_requested.wait()
        _log.info('drain requested by a gateway')
        await self.drain()
        await wait_idle()
        stopping.set()

    async def _maintain(self, lease: _Lease) -> None:
        """Acquire the lease whenever it is lost, because a sampler without a lease receives no requests."""
        while True:
            holding = asyncio.create_task(self._hold(lease), name=f'hold a lease of {lease.gateway.address}')
            try:
                await asyncio.wait([holding])
            finally:
                holding.cancel()
            lease.is_held = False
            if self._is_draining:
                lease.drain_settled.set()
            error = None if holding.cancelled() else holding.exception()
            if error is not None:
                self._on_lost(lease, error)
            await asyncio.sleep(lease.retry_seconds)
            lease.retry_seconds = min(2 * lease.retry_seconds, _MAX_RETRY_SECONDS)

    async def _hold(self, lease: _Lease) -> None:
        """Register this sampler, and renew its lease until the lease is lost."""
        self._on_registered(lease, await lease.gateway.register(self._report(self._is_draining)))
        # Closed explicitly: a generator of reports that outlives its lease would clear `changed` for the next lease.
        async with (
            aclosing(self._reports(lease)) as reports,
            aclosing(lease.gateway.lease(reports)) as renewals,
        ):
            async for renewal in renewals:
                lease.retry_seconds = _FIRST_RETRY_SECONDS
                self._apply(lease, renewal)

    async def _reports(self, lease: _Lease) -> AsyncGenerator[ReplicaReport, None]:
        """Yield a report now, after every change, and at least once per report interval."""
        while True:
            lease.changed.clear()
            yield self._report(self._is_draining)
            await asyncio.sleep(MIN_REPORT_INTERVAL.total_seconds())
            remaining = lease.report_interval - MIN_REPORT_INTERVAL
            try:
                async with asyncio.timeout(max(remaining.total_seconds(), 0.0)):
                    await lease.changed.wait()
            except TimeoutError:
                continue

    def _on_registered(self, lease: _Lease, registration: Registration) -> None:
        lease.is_lost, lease.is_held = False, True
        lease.report_interval = min(registration.lease_interval, self._max_interval) / REPORTS_PER_LEASE
        if registration.checkpoint_address:
            self._use_checkpoint(registration.checkpoint_address)
        _log.info('joined fleet', gateway=lease.gateway.address)

    def _apply(self, lease: _Lease, renewal: LeaseRenewal) -> None:
        lease.report_interval = min(renewal.lease_interval, self._max_interval) / REPORTS_PER_LEASE
        self._use_relay(renewal.weight_source_address)
        if renewal.is_drain_requested:
            # A gateway also sets the flag after this sampler has announced a drain, so the flag acknowledges the drain.
            if self._is_draining:
                lease.drain_settled.set()
            self.drain_requested.set()

    def _on_lost(self, lease: _Lease, error: BaseException) -> None:
        if not isinstance(error, DomainError):
            _log.error('lease failed', gateway=lease.gateway.address, exc_info=error)
        elif not lease.is_lost:
            _log.warning('lease lost; retrying', gateway=lease.gateway.address, error=str(error))
        lease.is_lost = True
