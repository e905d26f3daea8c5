"""Work that continues when its caller is cancelled."""

import asyncio

import pytest

from twinkle_services.kit.worker import completed


@pytest.mark.parametrize('cancellations', [1, 2, 3])
@pytest.mark.parametrize('is_failing', [False, True])
async def test_cancelled_caller_waits_until_the_work_has_completed(*, cancellations: int, is_failing: bool) -> None:
    """Any number of cancellations take effect only after the work has completed or failed."""
    gate, done = asyncio.Event(), list[str]()

    async def work() -> None:
        await gate.wait()
        done.append('done')
        if is_failing:
            raise OSError

    caller = asyncio.ensure_future(completed(work()))
    for _ in range(cancellations):
        await asyncio.sleep(0)
        caller.cancel()
    await asyncio.sleep(0)
    assert not caller.done()
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert done == ['done']


async def test_result_and_error_reach_a_caller_that_is_not_cancelled() -> None:
    """The caller receives the result or the error of the work."""

    async def fail() -> None:
        raise OSError('failing')

    assert await completed(asyncio.sleep(0, 'result')) == 'result'
    with pytest.raises(OSError, match='failing'):
        await completed(fail())
