"""Tests of the backoff between attempts during an outage."""

import asyncio
from datetime import timedelta

import grpc
import pytest

from twinkle_client import RetryableError
from twinkle_client.errors import ErrorFacts
from twinkle_client.rpc.retry import Backoff, Outages


class _Loop(asyncio.SelectorEventLoop):
    """An event loop whose clock can be advanced."""

    ahead = 0.0

    def time(self) -> float:
        return super().time() + self.ahead


@pytest.mark.parametrize(('lasting', 'attempts'), [(2.0, 3), (11.0, 5)])
def test_attempts_of_a_few_seconds_are_one_outage(lasting: float, attempts: int) -> None:
    """Attempts of a few seconds belong to one outage; only a longer attempt starts a new outage."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        assert runner.run(_failures(timedelta(seconds=3), lasting=lasting, max_failures=5)) == attempts


def test_work_in_progress_is_no_outage() -> None:
    """A call that waits until a stream has been read up to its position is retried without a limit."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        failures = _failures(timedelta(seconds=3), lasting=2.0, max_failures=5, reason='POSITION_NOT_REACHED')
        assert runner.run(failures) == 5


def test_progress_is_logged_without_a_time_limit(caplog: pytest.LogCaptureFixture) -> None:
    """The warning of a call that waits for work in progress has the progress, and no time after which it gives up."""
    message = 'loader ld-1 has reached row 7; retry later'
    facts = ErrorFacts(code=grpc.StatusCode.UNAVAILABLE, message=message, reason='POSITION_NOT_REACHED')
    Outages('127.0.0.1:8000').add(object(), RetryableError(facts), seconds=3.0)
    assert caplog.messages == ['loader ld-1 has reached row 7; retrying']


async def _failures(retry_timeout: timedelta, *, lasting: float, max_failures: int, reason: str = '') -> int:
    """Return the number of failed attempts until the backoff gives up, at most `max_failures`."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, _Loop)
    backoff = Backoff(retry_timeout.total_seconds(), Outages('127.0.0.1:8000'))
    facts = ErrorFacts(code=grpc.StatusCode.UNAVAILABLE, message='', reason=reason, retry_after=timedelta(0))
    error = RetryableError(facts)
    for attempt in range(1, max_failures):
        loop.ahead += lasting
        try:
            await backoff.wait_or_raise(error)
        except RetryableError:
            return attempt
    return max_failures
