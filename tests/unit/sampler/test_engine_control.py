"""Tests of cancelled pauses of the engine."""

import asyncio
from contextlib import suppress

import pytest

from fixtures.fake_sampler_engine import FakeSamplerEngine
from twinkle_services.kit.caller import Caller
from twinkle_services.sampler.application.admission import Admission
from twinkle_services.sampler.application.engine_control import EngineControl, PauseMode
from twinkle_services.sampler.domain.running_requests import RunningRequest, RunningRequests

OPERATOR = Caller(tenant_id='operator', scopes=frozenset({'operator'}))


@pytest.mark.parametrize('is_paused', [False, True])
async def test_cancelled_pause_restores_the_earlier_state(*, is_paused: bool) -> None:
    """The engine admits requests again after a cancelled pause, unless an earlier pause is in effect."""
    engine = FakeSamplerEngine()
    admission = Admission(engine, slots=1, queue_limit=1)
    control = EngineControl(engine, admission, RunningRequests())
    async with admission.slot(RunningRequest(tenant_id='a', request_id='one')):
        if is_paused:
            await control.pause(OPERATOR, PauseMode.KEEP)
        waiting = asyncio.create_task(control.pause(OPERATOR, PauseMode.WAIT))
        await asyncio.sleep(0)
        assert not admission.is_open
        waiting.cancel()
        with suppress(asyncio.CancelledError):
            await waiting
        assert admission.is_open is not is_paused
    await control.resume(OPERATOR)
    assert admission.is_open
