"""Dispatch of requests to samplers: refusals while the gateway stops, and requests on lost samplers."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest

from twinkle_services.gateway.errors import NoReplica, RequestCrashed
from twinkle_services.gateway.fleet.members import Membership
from twinkle_services.gateway.fleet.rules import Fleet, Replica, ReplicaReport
from twinkle_services.gateway.fleet.sampler_choice import RouteKey
from twinkle_services.gateway.sampling.batch import BatchDivision
from twinkle_services.gateway.sampling.dispatch import Dispatch
from twinkle_services.gateway.sampling.rules import BatchRequest, RoutedRequest
from twinkle_services.gateway.sampling.sampling import Sampling
from twinkle_services.gateway.sampling.suspects import MAX_CONSECUTIVE_FAILURES, Attempt
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.clock import FakeClock
from twinkle_services.kit.errors import Draining, ServiceUnreachable

KEY = RouteKey(base_model='m', blocks=(1,))


@pytest.mark.parametrize('is_started', [True, False])
async def test_waiting_request_is_refused_when_the_gateway_stops(is_started: bool) -> None:  # noqa: FBT001
    """A request that waits for a replica fails with Draining; a request with a free replica does not."""
    membership = Membership(Fleet(clock=FakeClock(), lease=timedelta(seconds=10), forget_after=timedelta(minutes=1)))
    membership.fleet.register(ReplicaReport(replica_id='a', service='sampler', address='h:a', base_models=('m',)))
    dispatch = Dispatch(membership, replica_wait=timedelta(minutes=1), begin_wait=timedelta(minutes=1))
    waiting = asyncio.create_task(dispatch.find(Attempt(key=KEY, is_started=is_started, tried={'a'})))
    membership.fleet.mark_lost('a')
    await asyncio.sleep(0)
    membership.close()
    with pytest.raises(Draining):
        await waiting
    membership.fleet.register(ReplicaReport(replica_id='b', service='sampler', address='h:b', base_models=('m',)))
    assert (await dispatch.find(Attempt(key=KEY))).replica_id == 'b'
    with pytest.raises(Draining):
        await dispatch.find(Attempt(key=KEY, is_started=is_started, tried={'b'}))


class Harness:
    """A dispatcher whose samplers can be lost while they run requests."""

    def __init__(self, *replica_ids: str) -> None:
        lease = timedelta(minutes=10)
        self.membership = Membership(Fleet(clock=FakeClock(), lease=lease, forget_after=timedelta(minutes=1)))
        for name in replica_ids:
            self.join(name)
        self.dispatch = Dispatch(self.membership, replica_wait=timedelta(minutes=1), begin_wait=timedelta(minutes=1))

    def join(self, replica_id: str) -> None:
        """Register a sampler."""
        report = ReplicaReport(replica_id=replica_id, service='sampler', address=f'h:{replica_id}', base_models=('m',))
        self.membership.fleet.register(report)

    @contextmanager
    def run(self, attempt: Attempt, replica: Replica) -> Iterator[None]:
        """Run a request on a sampler during the block."""
        with self.dispatch.reserve(replica, attempt, 1) as slot:
            assert slot.is_granted
            yield

    def lose(self, *attempts: Attempt, replica: Replica) -> None:
        """Report the loss of a sampler to its requests, one after the other."""
        for attempt in attempts:
            self.dispatch.record_failure(attempt, replica, ServiceUnreachable('sampler'))


class LostSamplers:
    """A client whose samplers cannot be reached."""

    call_count = 0

    async def load(self, dispatch: Dispatch, kind: str) -> None:
        """Load an adapter in a single call, or resolve the version of a batch if `kind` is 'version'."""
        samplers: Any = self
        if kind == 'version':
            request = BatchRequest(message=b'batch', keys=(KEY,), is_version_open=True)
            await BatchDivision(dispatch, samplers).resolve_version(request, sampling('batch'))
            return
        unused: Any = None
        verbs = Sampling(dispatch, samplers, gate=unused, meter=unused)
        caller = Caller(tenant_id='alice', scopes=frozenset({'sample'}))
        await verbs.call_one(caller, RoutedRequest(method='LoadAdapter', message=b'load', key=KEY))

    async def call(self, *_: Any, **__: Any) -> bytes:
        self.call_count += 1
        raise ServiceUnreachable('sampler')

    async def resolve(self, *_: Any, **__: Any) -> int:
        self.call_count += 1
        raise ServiceUnreachable('sampler')


def sampling(name: str, **fields: Any) -> Attempt:
    """Return the attempt of a request."""
    return Attempt(key=KEY, message=name.encode(), **fields)


async def test_request_that_reaches_a_lost_sampler_is_not_suspected() -> None:
    """The loss of a sampler counts as a failure of its running requests, but not of later requests."""
    harness = Harness('a')
    culprit, innocent = sampling('culprit', consecutive_failures=1), sampling('innocent', consecutive_failures=2)
    replica = await harness.dispatch.find(culprit)
    with harness.run(culprit, replica):
        pass
    harness.lose(culprit, replica=replica)
    for _ in range(10):
        with harness.run(innocent, replica):
            pass
        harness.lose(innocent, replica=replica)
    assert (culprit.consecutive_failures, innocent.consecutive_failures) == (2, 2)


@pytest.mark.parametrize('kind', ['call', 'version'])
async def test_loading_call_to_a_lost_sampler_is_not_suspected(kind: str) -> None:
    """A call that is sent to an already lost sampler, to load an adapter or resolve a version, is not suspected."""
    harness, culprit, samplers = Harness('a'), sampling('culprit'), LostSamplers()
    harness.dispatch = Dispatch(harness.membership, replica_wait=timedelta(0), begin_wait=timedelta(0))
    replica = await harness.dispatch.find(culprit)
    with harness.run(culprit, replica):
        pass
    harness.lose(culprit, replica=replica)
    for _ in range(2 * MAX_CONSECUTIVE_FAILURES):
        with pytest.raises(NoReplica):
            await samplers.load(harness.dispatch, kind)
    assert samplers.call_count == 2 * MAX_CONSECUTIVE_FAILURES


@pytest.mark.parametrize('is_delivering', [False, True])
async def test_last_failure_counts_less_if_another_request_ran(is_delivering: bool) -> None:  # noqa: FBT001
    """A request fails with its third lost sampler, unless another request that ran there may be the cause."""
    harness = Harness('a')
    replica = await harness.dispatch.find(sampling('any'))
    suspect, other = sampling('suspect', consecutive_failures=2), sampling('other', is_delivering=is_delivering)
    with harness.run(other, replica):
        with harness.run(suspect, replica):
            pass
        if is_delivering:
            with pytest.raises(RequestCrashed):
                harness.lose(suspect, replica=replica)
            return
        harness.lose(suspect, replica=replica)
    harness.lose(other, replica=replica)
    assert (suspect.consecutive_failures, other.consecutive_failures) == (2.25, 1)


async def test_request_that_crashes_samplers_among_others_fails_eventually() -> None:
    """A request that always runs together with others fails after a bounded number of lost samplers."""
    harness, suspect = Harness(), sampling('suspect')
    for number in range(6):
        harness.join(f'r{number}')
        replica = next(item for item in harness.membership.fleet.serving('sampler') if item.replica_id == f'r{number}')
        with harness.run(sampling(f'other {number}'), replica):
            with harness.run(suspect, replica):
                pass
            if number == 5:
                with pytest.raises(RequestCrashed):
                    harness.lose(suspect, replica=replica)
            else:
                harness.lose(suspect, replica=replica)


async def test_new_requests_let_a_suspected_one_run_first() -> None:
    """A suspected request waits for the requests on its sampler, and new requests wait for its first progress."""
    harness = Harness('a')
    running, suspect = sampling('running'), sampling('suspect', consecutive_failures=2)
    replica = await harness.dispatch.find(running)
    with harness.run(running, replica):
        finding = asyncio.create_task(harness.dispatch.find(suspect))
        await asyncio.wait([finding], timeout=0.2)
        assert not finding.done()
        harness.dispatch.record_success(running, replica, has_tokens=True)
        assert await finding is not None
    new = asyncio.create_task(harness.dispatch.find(sampling('new')))
    await asyncio.wait([new], timeout=0.2)
    assert not new.done()
    harness.dispatch.record_success(suspect, replica, has_tokens=True)
    assert (await new).replica_id == 'a'


async def test_suspect_without_a_sampler_ends_its_turn() -> None:
    """A suspected request fails if its sampler is lost while it waits, and others run once another sampler joins."""
    harness = Harness('a')
    harness.dispatch = Dispatch(harness.membership, replica_wait=timedelta(0), begin_wait=timedelta(0))
    running, suspect = sampling('running'), sampling('suspect', consecutive_failures=2)
    replica = await harness.dispatch.find(running)
    with harness.run(running, replica):
        finding = asyncio.create_task(harness.dispatch.find(suspect))
        await asyncio.wait([finding], timeout=0.2)
        harness.membership.fleet.mark_lost('a')
    with pytest.raises(NoReplica):
        await finding
    harness.join('b')
    assert (await asyncio.wait_for(harness.dispatch.find(sampling('new')), 1)).replica_id == 'b'


async def test_cancelled_suspect_ends_its_turn() -> None:
    """If a suspected request's client disconnects while it waits for its sampler, other requests run immediately."""
    harness = Harness('a')
    running, suspect = sampling('running'), sampling('suspect', consecutive_failures=2)
    replica = await harness.dispatch.find(running)
    with harness.run(running, replica):
        finding = asyncio.create_task(harness.dispatch.find(suspect))
        await asyncio.wait([finding], timeout=0.2)
        finding.cancel()
        await asyncio.gather(finding, return_exceptions=True)
        assert (await harness.dispatch.find(sampling('new'))).replica_id == 'a'
