"""Turns at the engine: bounded, fair, and given back in every case."""

import asyncio

import pytest

from services.kit.errors import QueueFull
from services.sampler.application.admission import Admission
from services.sampler.domain.errors import EnginePaused
from services.sampler.domain.running_requests import RunningRequest


def request(tenant_id: str, name: str = 'r') -> RunningRequest:
    """Return a request."""
    return RunningRequest(tenant_id=tenant_id, request_id=name)


class Visitor:
    """A prompt that takes a turn and stays until told to go."""

    def __init__(self, admission: Admission, request: RunningRequest) -> None:
        self.request = request
        self.is_inside = False
        self.leave = asyncio.Event()
        self.task = asyncio.create_task(self._visit(admission))

    async def _visit(self, admission: Admission) -> None:
        async with admission.turn(self.request):
            self.is_inside = True
            await self.leave.wait()
        self.is_inside = False

    async def go(self) -> None:
        """Leave and wait until it is done."""
        self.leave.set()
        await self.task


async def turn_over() -> None:
    """Let every task that can run do so."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_tenants_take_turns():
    """One that came later with one prompt is not behind all prompts of one that came first."""
    admission = Admission(places=1, queue_limit=10)
    first = [Visitor(admission, request('a')) for _ in range(3)]
    await turn_over()
    other = Visitor(admission, request('b'))
    await turn_over()
    assert [visitor.is_inside for visitor in first] == [True, False, False]
    await first[0].go()
    await first[1].go()
    await turn_over()
    assert other.is_inside
    assert not first[2].is_inside
    for visitor in (other, first[2]):
        await visitor.go()
    await admission.wait_idle()


async def test_queue_is_bounded_by_tenant():
    """A tenant's own waiting prompts refuse its next request, nobody else's."""
    admission = Admission(places=1, queue_limit=2)
    visitors = [Visitor(admission, request('a')) for _ in range(3)]
    await turn_over()
    with pytest.raises(QueueFull):
        admission.check_open('a')
    admission.check_open('b')
    assert admission.waiting_count == 2
    for visitor in visitors:
        await visitor.go()


async def test_cancelled_turns_are_given_back():
    """Whether cancelled while waiting, inside, or in the moment of entering, no place is lost."""
    admission = Admission(places=1, queue_limit=10)
    inside, entering, waiting, last = (Visitor(admission, request('a')) for _ in range(4))
    await turn_over()
    waiting.task.cancel()
    inside.leave.set()
    await asyncio.sleep(0)
    entering.task.cancel()
    await asyncio.wait([waiting.task, entering.task, inside.task])
    await turn_over()
    assert last.is_inside
    await last.go()
    await admission.wait_idle()


async def test_hastened_request_gets_through_at_once():
    """The waiting prompts of an aborted request are let in to be ended, beyond the places."""
    admission = Admission(places=1, queue_limit=10)
    inside, aborted = Visitor(admission, request('a')), Visitor(admission, request('a', 'aborted'))
    await turn_over()
    admission.hasten(aborted.request)
    await turn_over()
    assert aborted.is_inside
    await aborted.go()
    assert inside.is_inside
    await inside.go()
    await admission.wait_idle()


async def test_closed_door_refuses_new_requests_until_opened():
    """Those that wait still get their turn."""
    admission = Admission(places=1, queue_limit=10)
    inside, waiting = Visitor(admission, request('a')), Visitor(admission, request('a'))
    await turn_over()
    admission.close()
    with pytest.raises(EnginePaused):
        admission.check_open('b')
    await inside.go()
    await turn_over()
    assert waiting.is_inside
    await waiting.go()
    await admission.wait_idle()
    admission.open()
    admission.check_open('b')
