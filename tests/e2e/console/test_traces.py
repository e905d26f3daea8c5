"""Traces in the console: the list, the trace of a training step, and files for Perfetto."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Page
from typer.testing import CliRunner

from fixtures.console_browser import ConsolePage
from fixtures.console_data import ConsoleData
from twinkle_client.cli import app
from twinkle_client.stack import StackState

pytestmark = [pytest.mark.asyncio(loop_scope='module'), pytest.mark.timeout(300)]


async def test_traces_are_filtered(logged_in: ConsolePage, console_data: ConsoleData) -> None:
    """A run, a request, a duration and the kind of calls select traces; the page's address has the filters."""
    page = logged_in.page
    links = page.get_by_role('region', name='List of traces').get_by_role('cell').get_by_role('link')
    await logged_in.show('#/traces', 'gateway')
    await page.get_by_label('Run id').fill(console_data.compared_run)
    await page.locator('main').get_by_text(console_data.trained_run).first.wait_for(state='detached')
    assert console_data.compared_run in await links.all_inner_texts()
    await page.get_by_label('At least, ms').fill('3600000')
    await page.get_by_text('No trace matches the filters').wait_for()
    assert 'minimum=3600000' in page.url
    await page.get_by_role('button', name='Show all traces').click()
    await page.locator('main').get_by_text('gateway').first.wait_for()
    assert await page.get_by_text('GetRun').count() == 0
    await page.get_by_label('Reads and heartbeats').check()
    await page.locator('main').get_by_text('console.rpc').first.wait_for()
    await page.get_by_label('All tenants').check()
    await page.get_by_role('columnheader', name='Tenant').wait_for()
    await page.get_by_label('Request id').fill('rq-unknown')
    await page.get_by_text('No trace matches the filters').wait_for()


async def test_an_operation_leads_to_its_trace(logged_in: ConsolePage, console_data: ConsoleData) -> None:
    """The link of an operation opens the trace with spans of all services; one step back returns to the operations."""
    page = logged_in.page
    await logged_in.show(f'#/runs/{console_data.trained_run}/operations', 'following')
    # Other tests call the newest operations from the console, without a traced client.
    link = page.get_by_role('link', name='Trace of operation').last
    number = str(await link.get_attribute('aria-label')).split()[-1]
    await link.click()
    grid = page.get_by_role('treegrid')
    await grid.get_by_text('TrainingService/Execute').first.wait_for()
    data = await logged_in.json_twin()
    numbers = [span['attributes'].get('twinkle.sequence_number') for span in data['spans'] if 'attributes' in span]
    assert number in numbers
    assert {span['service'] for span in data['spans']} >= {'client', 'gateway', 'model'}
    await page.go_back()
    await page.get_by_role('button', name='Undo optimizer steps').wait_for()


async def test_the_keyboard_moves_through_a_trace(logged_in: ConsolePage, console_data: ConsoleData) -> None:
    """Arrows move between spans, Enter shows attributes, and a shared pass links to the other operation."""
    page = logged_in.page
    await logged_in.show(f'#/traces/{console_data.shared_trace}', 'shared with')
    await page.get_by_role('treegrid').locator('tr[data-index="0"]').focus()
    keyboard = page.keyboard
    await keyboard.press('ArrowDown')
    assert await _focused(page, 'data-index') == '1'
    await keyboard.press('ArrowLeft')
    assert await _focused(page, 'data-index') == '0'
    await keyboard.press('ArrowRight')
    await keyboard.press('ArrowUp')
    await keyboard.press('ArrowUp')
    assert await _focused(page, 'data-index') == '0'
    await keyboard.press('End')
    assert int(await _focused(page, 'data-index')) + 1 == await page.locator('tr[data-index]').count()
    await keyboard.press('Home')
    index = await page.locator('tr[data-index]', has_text='shared with').first.get_attribute('data-index')
    for _ in range(int(str(index))):
        await keyboard.press('ArrowDown')
    await keyboard.press('Enter')
    assert await _focused(page, 'aria-expanded') == 'true'
    await page.get_by_text('twinkle.adapter_count').wait_for()
    for scheme in ('light', 'dark'):
        await page.emulate_media(color_scheme=scheme, reduced_motion='reduce')
        assert await logged_in.violations() == [], scheme
    await keyboard.press('Tab')
    await keyboard.press('Enter')
    await page.get_by_text(console_data.linked_trace).first.wait_for()
    assert await page.locator('tr[aria-expanded="true"]').count() == 1


async def _focused(page: Page, attribute: str) -> str:
    return await page.evaluate('name => document.activeElement.getAttribute(name)', attribute)


async def test_a_trace_is_downloaded_for_perfetto(
    logged_in: ConsolePage, console_data: ConsoleData, console_stack: StackState, tmp_path: Path
) -> None:
    """The page and the command line write the same events; a run's file has the spans of several operations."""
    await logged_in.show(f'#/traces/{console_data.shared_trace}', 'shared with')
    shown = await _download(logged_in.page)
    path = tmp_path / 'trace.json'
    command = ['trace', console_data.shared_trace, '--perfetto', str(path), '--state-dir', str(console_stack.state_dir)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert shown == json.loads(path.read_text())
    await logged_in.show(f'#/runs/{console_data.trained_run}', 'reward/mean')
    run = await _download(logged_in.page)
    ids = {event['args']['trace_id'] for event in run['traceEvents'] if event['ph'] == 'X'}
    assert len(ids) > 10
    assert console_data.other_trace not in ids


async def _download(page: Page) -> Any:
    async with page.expect_download() as started:
        await page.get_by_role('button', name='Perfetto').click()
    return json.loads((await (await started.value).path()).read_text())


async def test_operators_see_traces_of_all_tenants(
    page: ConsolePage, make_key: Callable[..., str], console_data: ConsoleData
) -> None:
    """An operator opens another tenant's trace from the list of all tenants; other keys have no such list."""
    await page.log_in(make_key(console_data.tenant_id, 'operator'))
    await page.show(f'#/traces/{console_data.other_trace}', 'TRACE_NOT_FOUND')
    await page.show(f'#/traces/{console_data.other_trace}?tenants=all', console_data.other_tenant)
    await page.page.get_by_role('button', name='Log out').click()
    await page.log_in(make_key(console_data.tenant_id, 'train'))
    await page.show('#/traces', 'gateway')
    assert await page.page.get_by_label('All tenants').count() == 0
    await page.show(f'#/traces/{console_data.other_trace}?tenants=all', 'SCOPE_MISSING')
