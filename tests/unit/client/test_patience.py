"""How long an outage is borne."""

import asyncio
from datetime import timedelta

import grpc
import pytest

from twinkle_client import RetryableError
from twinkle_client.errors import ErrorFacts
from twinkle_client.rpc.patience import Patience


class _Loop(asyncio.SelectorEventLoop):
    """A loop whose clock can be put forward."""

    ahead = 0.0

    def time(self) -> float:
        """Return the time of this loop, in seconds."""
        return super().time() + self.ahead


@pytest.mark.parametrize(('lasting', 'attempts'), [(2.0, 3), (11.0, 5)])
def test_attempts_that_take_grpc_s_own_retries_are_one_outage(lasting: float, attempts: int) -> None:
    """A short patience ends all the same; only an attempt that was surely worked on begins to count anew."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        assert runner.run(_failures(timedelta(seconds=3), lasting=lasting, most=5)) == attempts


async def _failures(patience: timedelta, *, lasting: float, most: int) -> int:
    """Return how many attempts fail until there should be no other one."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, _Loop)
    bearing = Patience(patience.total_seconds())
    error = RetryableError(ErrorFacts(code=grpc.StatusCode.UNAVAILABLE, message='', retry_after=timedelta(0)))
    for attempt in range(1, most):
        loop.ahead += lasting
        try:
            await bearing.wait_or_raise(error)
        except RetryableError:
            return attempt
    return most
