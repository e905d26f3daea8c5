"""Curves that follow a run: one stream per page, several runs in one stream, and polling after an error."""

import pytest

from fixtures.console_browser import ConsolePage
from fixtures.console_data import ConsoleData
from twinkle_client import TwinkleClient
from twinkle_client.metrics import RunMetrics
from twinkle_client.stack import StackState

pytestmark = [pytest.mark.asyncio(loop_scope='module'), pytest.mark.timeout(300)]


def open_streams(page: ConsolePage) -> list[str]:
    """Return the methods of the page's open streams."""
    return [
        request.url.rpartition('/')[2]
        for request in page.requests
        if '/Watch' in request.url and request.timing['responseEnd'] < 0 and request.failure is None
    ]


def call_count(page: ConsolePage, method: str) -> int:
    """Return the number of calls of a method since the page was opened."""
    return sum(request.url.endswith(f'/{method}') for request in page.requests)


async def log(stack: StackState, data: ConsoleData, run_id: str, name: str, value: float, *, step: int) -> None:
    """Log a value of a run."""
    with TwinkleClient(stack.address, data.key) as client:
        await RunMetrics(run_id, client=client).log.aio({name: value}, step=step)


async def test_run_page_has_one_stream(
    logged_in: ConsolePage, console_stack: StackState, console_data: ConsoleData
) -> None:
    """The curves arrive on one stream without polling. The section of operations, if open, uses the stream instead."""
    await logged_in.show(f'#/runs/{console_data.compared_run}', 'train/loss')
    polls = call_count(logged_in, 'GetMetrics')
    await log(console_stack, console_data, console_data.compared_run, 'live/a', 0.375, step=500)
    await logged_in.page.locator('figure').filter(has_text='live/a').get_by_text('0.375').wait_for()
    await logged_in.page.get_by_text('Co-batched').wait_for()
    assert call_count(logged_in, 'GetMetrics') == polls
    assert call_count(logged_in, 'WatchMetrics') == 1
    assert open_streams(logged_in) == ['WatchMetrics']
    await logged_in.show(f'#/runs/{console_data.compared_run}/operations', 'Queue and device time')
    await logged_in.page.get_by_role('region', name='Operations').get_by_text('step 1', exact=False).first.wait_for()
    assert open_streams(logged_in) == ['WatchOperations']
    await logged_in.show(f'#/runs/{console_data.compared_run}', 'live/a')
    await log(console_stack, console_data, console_data.compared_run, 'live/a', 0.625, step=501)
    await logged_in.page.locator('figure').filter(has_text='live/a').get_by_text('0.625').wait_for()
    assert open_streams(logged_in) == ['WatchMetrics']


async def test_compared_runs_share_a_stream(
    logged_in: ConsolePage, console_stack: StackState, console_data: ConsoleData
) -> None:
    """The chart of several runs follows all of them on one stream."""
    runs = console_data.trained_run, console_data.compared_run
    await logged_in.show(f'#/runs?compare={runs[0]}&compare={runs[1]}', 'Comparison of 2 runs')
    polls = call_count(logged_in, 'GetMetrics')
    for number, run_id in enumerate(runs):
        await log(console_stack, console_data, run_id, 'live/b', 1.0 + number, step=7)
    chart = logged_in.page.get_by_role('region', name='Comparison')
    await chart.get_by_label('Metric').select_option('live/b')
    for name in ('sft-cosine', 'sft-low-rate'):
        await chart.locator('figure').get_by_text(name).first.wait_for()
    assert call_count(logged_in, 'WatchMetrics') == 1
    assert call_count(logged_in, 'GetMetrics') == polls


async def test_curves_are_polled_while_the_stream_fails(
    logged_in: ConsolePage, console_stack: StackState, console_data: ConsoleData
) -> None:
    """A page whose stream fails shows the stored curves and new points, without an error."""
    await logged_in.page.route('**/WatchMetrics', lambda route: route.abort())
    await logged_in.show(f'#/runs/{console_data.trained_run}', 'train/loss')
    polls = call_count(logged_in, 'GetMetrics')
    await log(console_stack, console_data, console_data.trained_run, 'live/c', 0.875, step=9)
    await logged_in.page.locator('figure').filter(has_text='live/c').get_by_text('0.875').wait_for()
    assert await logged_in.page.get_by_role('alert').count() == 0
    assert call_count(logged_in, 'GetMetrics') > polls
    logged_in.errors.clear()
