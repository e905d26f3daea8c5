"""Admission to the engine: slots are bounded, fair between tenants, and never lost."""

import asyncio
from typing import Any

import pytest

from fixtures.fake_sampler_engine import FakeSamplerEngine
from twinkle_services.kit.errors import QueueFull
from twinkle_services.sampler.application.admission import Admission
from twinkle_services.sampler.application.replica import Replica
from twinkle_services.sampler.domain.errors import EnginePaused
from twinkle_services.sampler.domain.running_requests import RunningRequest


def request(tenant_id: str, name: str = 'r') -> RunningRequest:
    return RunningRequest(tenant_id=tenant_id, request_id=name)


def one_slot(*, queue_limit: int = 10) -> Admission:
    return Admission(FakeSamplerEngine(), slots=1, queue_limit=queue_limit)


class Prompt:
    """A prompt that takes a slot, and releases it when the test calls `end`."""

    def __init__(self, admission: Admission, request: RunningRequest) -> None:
        self.request = request
        self.is_running = False
        self.released = asyncio.Event()
        self.task = asyncio.create_task(self._run(admission))

    async def _run(self, admission: Admission) -> None:
        async with admission.slot(self.request):
            self.is_running = True
            await self.released.wait()
        self.is_running = False

    async def end(self) -> None:
        """Release the slot and wait until the task is done."""
        self.released.set()
        await self.task


async def run_ready_tasks() -> None:
    """Run every task until it waits."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_slots_rotate_between_tenants():
    """A tenant with one prompt does not wait for all prompts of a tenant that came first."""
    admission = one_slot()
    first = [Prompt(admission, request('a')) for _ in range(3)]
    await run_ready_tasks()
    other = Prompt(admission, request('b'))
    await run_ready_tasks()
    assert [prompt.is_running for prompt in first] == [True, False, False]
    await first[0].end()
    await first[1].end()
    await run_ready_tasks()
    assert other.is_running
    assert not first[2].is_running
    for prompt in (other, first[2]):
        await prompt.end()
    await admission.wait_idle()


async def test_queue_is_bounded_by_tenant():
    """A tenant's full queue refuses the tenant's next request, but no requests of other tenants."""
    admission = one_slot(queue_limit=2)
    prompts = [Prompt(admission, request('a')) for _ in range(3)]
    await run_ready_tasks()
    with pytest.raises(QueueFull):
        admission.check_open('a')
    admission.check_open('b')
    assert admission.load.waiting_sequences == 2
    for prompt in prompts:
        await prompt.end()


async def test_cancelled_prompts_release_their_slots():
    """No slot is lost if a prompt is cancelled while it waits, runs or is being granted a slot."""
    admission = one_slot()
    running, granted, waiting, last = (Prompt(admission, request('a')) for _ in range(4))
    await run_ready_tasks()
    waiting.task.cancel()
    running.released.set()
    await asyncio.sleep(0)
    granted.task.cancel()
    await asyncio.wait([waiting.task, granted.task, running.task])
    await run_ready_tasks()
    assert last.is_running
    await last.end()
    await admission.wait_idle()


async def test_aborted_request_is_admitted_immediately():
    """The waiting prompts of an aborted request are admitted even without a free slot, so that they can finish."""
    admission = one_slot()
    running, aborted = Prompt(admission, request('a')), Prompt(admission, request('a', 'aborted'))
    await run_ready_tasks()
    admission.admit_aborted(aborted.request)
    await run_ready_tasks()
    assert aborted.is_running
    await aborted.end()
    assert running.is_running
    await running.end()
    await admission.wait_idle()


async def test_closed_admission_refuses_new_requests_until_opened():
    """A closed admission refuses new requests until it is opened; prompts that already wait still get a slot."""
    admission = one_slot()
    running, waiting = Prompt(admission, request('a')), Prompt(admission, request('a'))
    await run_ready_tasks()
    admission.close()
    with pytest.raises(EnginePaused):
        admission.check_open('b')
    await running.end()
    await run_ready_tasks()
    assert waiting.is_running
    await waiting.end()
    await admission.wait_idle()
    admission.open()
    admission.check_open('b')


async def test_sampler_is_idle_once_no_request_is_served() -> None:
    """A request without a slot, for example one that fetches its adapter, delays the end of a drain."""
    admission = one_slot()
    unused: Any = None
    replica = Replica('rp-1', FakeSamplerEngine().facts, admission, unused)
    running = admission.requests.begin('a', 'r')
    waiting = asyncio.create_task(replica.wait_idle())
    await run_ready_tasks()
    assert not waiting.done()
    admission.requests.end(running)
    await waiting
