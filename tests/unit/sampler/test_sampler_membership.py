"""A sampler's membership with fake gateways: it reports, follows instructions, registers again and drains."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from datetime import timedelta

import pytest

from twinkle_services.kit.errors import ServiceUnreachable
from twinkle_services.sampler.application.membership import Membership
from twinkle_services.sampler.domain.fleet import LeaseRenewal, Registration, ReplicaReport
from twinkle_services.sampler.domain.generation import EngineLoad

LEASE = timedelta(seconds=0.3)


class FakeGateway:
    """Fake `ports.FleetGateway`; a test sets its responses."""

    address = 'gateway:1'

    def __init__(self) -> None:
        self.is_unreachable = False
        self.is_drain_requested = False
        self.weight_source_address = ''
        self.registrations: list[ReplicaReport] = []
        self.reports: list[ReplicaReport] = []
        self.reported = asyncio.Event()
        self.interrupted = asyncio.Event()

    async def register(self, report: ReplicaReport) -> Registration:
        if self.is_unreachable:
            raise ServiceUnreachable('gateway')
        self.registrations.append(report)
        return Registration(lease_interval=LEASE, checkpoint_address='checkpoint:1')

    async def lease(self, reports: AsyncIterator[ReplicaReport]) -> AsyncGenerator[LeaseRenewal, None]:
        """Respond to each report until a test interrupts the stream."""
        self.interrupted.clear()
        async for report in reports:
            self.reports.append(report)
            self.reported.set()
            if self.interrupted.is_set():
                raise ServiceUnreachable('gateway')
            is_leaving = self.is_drain_requested or report.is_draining
            yield LeaseRenewal(
                lease_interval=LEASE, is_drain_requested=is_leaving, weight_source_address=self.weight_source_address
            )

    async def next_report(self) -> ReplicaReport:
        self.reported.clear()
        await self.reported.wait()
        return self.reports[-1]


class Sampler:
    """A sampler whose state a membership reports, and which the membership configures."""

    def __init__(self, *gateways: FakeGateway) -> None:
        self.checkpoints: list[str] = []
        self.relays: list[str] = []
        self.idle = asyncio.Event()
        self.membership = Membership(
            gateways,
            report=self.report,
            use_checkpoint=self.checkpoints.append,
            use_relay=self.relays.append,
            max_interval=timedelta(seconds=10),
        )

    def report(self, is_draining: bool) -> ReplicaReport:  # noqa: FBT001 (the membership's own signature)
        return ReplicaReport(
            replica_id='rp-1',
            address='here:1',
            base_model='tiny',
            engine='fake',
            load=EngineLoad(),
            resident=(),
            is_draining=is_draining,
        )

    async def wait_idle(self) -> None:
        """Return once a test sets the event."""
        await self.idle.wait()


@pytest.fixture
def gateway() -> FakeGateway:
    """A gateway."""
    return FakeGateway()


async def test_reports_come_before_the_lease_ends_and_on_changes(gateway):
    """Reports are sent within the lease interval and after changes, and a gateway's addresses are applied."""
    sampler = Sampler(gateway)
    sampler.membership.start()
    await gateway.next_report()
    assert sampler.checkpoints == ['checkpoint:1']
    gateway.weight_source_address = 'other:1'
    await gateway.next_report()
    await gateway.next_report()
    assert sampler.relays[-1] == 'other:1'
    sampler.membership.report_soon()
    assert not (await gateway.next_report()).is_draining
    await sampler.membership.close()


async def test_unexpected_error_does_not_end_the_membership(gateway):
    """A report that fails once delays the registration but does not prevent it."""
    errors = [ValueError('no such field')]

    class BrokenSampler(Sampler):
        def report(self, is_draining: bool) -> ReplicaReport:  # noqa: FBT001 (the membership's own signature)
            if errors:
                raise errors.pop()
            return super().report(is_draining)

    sampler = BrokenSampler(gateway)
    sampler.membership.start()
    async with asyncio.timeout(10):
        await gateway.next_report()
    assert len(gateway.registrations) == 1
    await sampler.membership.close()


async def test_lost_lease_is_renewed(gateway):
    """The replica registers again if a gateway was unreachable, and if its stream broke."""
    gateway.is_unreachable = True
    sampler = Sampler(gateway)
    sampler.membership.start()
    await asyncio.sleep(0)
    gateway.is_unreachable = False
    await gateway.next_report()
    gateway.interrupted.set()
    await gateway.next_report()
    await gateway.next_report()
    assert len(gateway.registrations) == 2
    assert {report.replica_id for report in gateway.registrations} == {'rp-1'}
    await sampler.membership.close()


async def test_drained_sampler_finishes_before_it_leaves(gateway):
    """A sampler reports a requested drain, waits for running requests, and then stops."""
    sampler, stopping = Sampler(gateway), asyncio.Event()
    async with sampler.membership.serving(stopping, sampler.wait_idle):
        await gateway.next_report()
        gateway.is_drain_requested = True
        while not (await gateway.next_report()).is_draining:
            assert not stopping.is_set()
        assert not stopping.is_set()
        sampler.idle.set()
        await stopping.wait()
    await sampler.membership.close()


async def test_gateways_are_notified_before_the_stop(gateway):
    """Every reachable gateway gets a draining report before the block ends; unreachable gateways cause no wait."""
    unreachable = FakeGateway()
    unreachable.is_unreachable = True
    sampler = Sampler(gateway, unreachable)
    async with sampler.membership.serving(asyncio.Event(), sampler.wait_idle):
        await gateway.next_report()
    assert gateway.reports[-1].is_draining
    await sampler.membership.close()


async def test_drain_does_not_wait_for_a_gateway_that_stops_first():
    """A drain does not wait for a gateway that ended its lease and no longer responds, as when a stack stops."""

    class StoppingGateway(FakeGateway):
        """A gateway that ends its lease after the first report, and then hangs."""

        async def register(self, report: ReplicaReport) -> Registration:
            if self.registrations:
                await asyncio.Event().wait()
            return await super().register(report)

        async def lease(self, reports: AsyncGenerator[ReplicaReport, None]) -> AsyncGenerator[LeaseRenewal, None]:
            async for renewal in super().lease(reports):
                yield renewal
                return

    stopping = StoppingGateway()
    sampler = Sampler(stopping)
    sampler.membership.start()
    await stopping.next_report()
    async with asyncio.timeout(1):
        await sampler.membership.drain()
    await sampler.membership.close()


async def test_reports_of_an_ended_lease_are_closed(gateway):
    """The report generator of an ended lease is closed, so that only the next lease receives changes."""

    class DrainingGateway(FakeGateway):
        """A gateway that stops reading after the first report."""

        def __init__(self) -> None:
            super().__init__()
            self.report_streams: list[AsyncGenerator[ReplicaReport, None]] = []

        async def lease(self, reports: AsyncGenerator[ReplicaReport, None]) -> AsyncGenerator[LeaseRenewal, None]:
            self.report_streams.append(reports)
            self.reports.append(await anext(reports))
            self.reported.set()
            yield LeaseRenewal(lease_interval=LEASE, is_drain_requested=False, weight_source_address='')

    draining_gateway = DrainingGateway()
    sampler = Sampler(draining_gateway)
    sampler.membership.start()
    async with asyncio.timeout(10):
        while len(draining_gateway.report_streams) < 2:
            await draining_gateway.next_report()
        with pytest.raises(StopAsyncIteration):
            await anext(draining_gateway.report_streams[0])
    await sampler.membership.close()
