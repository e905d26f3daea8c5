"""Checkpoints in the console: downloads, pushes with progress and failures, lifetime, and missing scopes."""

import asyncio
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.async_api import Locator, Page

from fixtures.console_browser import ConsolePage
from fixtures.console_data import ConsoleData
from fixtures.exporting_stack import EXPORTED
from twinkle_client import TwinkleClient
from twinkle_client.stack import StackState

pytestmark = [pytest.mark.asyncio(loop_scope='module'), pytest.mark.timeout(300)]

FILES = {'adapter_config.json', 'adapter_model.safetensors'}


async def _row(page: ConsolePage, run_id: str) -> Locator:
    """Open the checkpoints of a run, and return the row of the checkpoint `final`."""
    await page.show(f'#/runs/{run_id}/versions', 'with optimizer')
    return page.page.get_by_role('region', name='Checkpoints').get_by_role('row').filter(has_text='with optimizer')


def _push_of(page: Page, target: str) -> Locator:
    return page.get_by_role('region', name='Pushes').get_by_role('row').filter(has_text=target)


async def test_a_checkpoint_is_downloaded_as_one_file(
    logged_in: ConsolePage, console_stack: StackState, console_data: ConsoleData, tmp_path: Path
) -> None:
    """The downloaded archive has the checkpoint's files, with the content that the client downloads."""
    row = await _row(logged_in, console_data.trained_run)
    async with logged_in.page.expect_download() as started:
        await row.get_by_role('button', name='Download final').click()
    download = await started.value
    assert download.suggested_filename == f'{console_data.trained_run}-final.tar'
    with tarfile.open(await download.path()) as archive:
        archive.extractall(tmp_path / 'browser', filter='data')
    with TwinkleClient(console_stack.address, console_data.key) as client:
        path = f'twinkle://{console_data.trained_run}/weights/final'
        folder = await client.download_checkpoint.aio(path, tmp_path / 'client')
    names = {item.name for item in (tmp_path / 'browser').iterdir()}
    assert names >= FILES
    for name in FILES:
        assert (tmp_path / 'browser' / name).read_bytes() == (folder / name).read_bytes()


async def test_a_download_of_another_tenant_is_refused(logged_in: ConsolePage, console_data: ConsoleData) -> None:
    """The address of another tenant's checkpoint is not found with this tenant's cookie."""
    address = f'{logged_in.url}/console/api/checkpoints/{console_data.other_run}/final'
    response = await logged_in.page.request.get(address)
    assert response.status == 404
    assert (await response.json())['error']['reason'] == 'CHECKPOINT_NOT_FOUND'


async def test_a_deleted_checkpoint_reports_its_error(
    logged_in: ConsolePage, console_stack: StackState, console_data: ConsoleData
) -> None:
    """The download of a checkpoint that another program has deleted shows the server's error and starts no download."""
    await _row(logged_in, console_data.compared_run)
    button = logged_in.page.get_by_role('button', name='Download weights-only')
    await button.wait_for()
    with TwinkleClient(console_stack.address, console_data.key) as client:
        await client.delete_checkpoint.aio(f'twinkle://{console_data.compared_run}/weights/weights-only')
    await button.click()
    await logged_in.page.get_by_role('alert').get_by_text('CHECKPOINT_NOT_FOUND').wait_for()


async def test_a_checkpoint_is_pushed_to_a_folder(
    logged_in: ConsolePage, console_stack: StackState, console_data: ConsoleData
) -> None:
    """A push to a folder needs no token and shows its end; then the folder has the checkpoint's files."""
    page = logged_in.page
    row = await _row(logged_in, console_data.trained_run)
    await row.get_by_role('button', name='Push final').click()
    await page.get_by_label('Target').fill('file:///from-the-console')
    assert await page.get_by_label('Token of the hub').count() == 0
    assert await logged_in.violations() == []
    await page.get_by_role('dialog').get_by_role('button', name='Push', exact=True).click()
    push = _push_of(page, 'file:///from-the-console')
    await push.get_by_text('done', exact=True).wait_for()
    assert '100 %' in await push.inner_text()
    assert await logged_in.violations() == []
    folder = console_stack.state_dir / EXPORTED / console_data.tenant_id / 'from-the-console'
    assert {item.name for item in await asyncio.to_thread(lambda: list(folder.iterdir()))} >= FILES


async def test_a_failing_push_is_retried_and_cancelled(logged_in: ConsolePage, console_data: ConsoleData) -> None:
    """The error for a refused target names its field; a failing hub is shown with the failure until a cancellation."""
    page = logged_in.page
    row = await _row(logged_in, console_data.trained_run)
    await row.get_by_role('button', name='Push final').click()
    await page.get_by_label('Token of the hub').fill('hf_secret')
    await page.get_by_label('Target').fill('hf://no-owner')
    await page.get_by_role('dialog').get_by_role('button', name='Push', exact=True).click()
    await page.get_by_role('dialog').get_by_role('alert').get_by_text('target', exact=True).wait_for()
    await page.get_by_label('Target').fill('hf://me/from-the-console')
    await page.get_by_role('dialog').get_by_role('button', name='Push', exact=True).click()
    push = _push_of(page, 'hf://me/from-the-console')
    await push.get_by_text('SERVICE_UNREACHABLE').wait_for()
    assert 'hf_secret' not in await page.content()
    await push.get_by_role('button', name='Cancel the push of final').click()
    await push.get_by_text('cancelled', exact=True).wait_for()


async def test_a_lifetime_is_set_and_removed(logged_in: ConsolePage, console_data: ConsoleData) -> None:
    """A checkpoint expires after the chosen time; if the lifetime is removed, it does not expire."""
    page = logged_in.page
    row = await _row(logged_in, console_data.trained_run)
    dialog = page.get_by_role('dialog')
    await row.get_by_role('button', name='Lifetime of final').click()
    await dialog.get_by_label('Amount of time').fill('36')
    await dialog.get_by_label('Unit of time').select_option('hours')
    assert await logged_in.violations() == []
    await dialog.get_by_role('button', name='Set', exact=True).click()
    await row.get_by_text('in 35 h').wait_for()
    await row.get_by_role('button', name='Lifetime of final').click()
    await dialog.get_by_label('Keep until deleted manually').check()
    await dialog.get_by_role('button', name='Set', exact=True).click()
    await row.get_by_text('never').wait_for()


@pytest.mark.parametrize(('scope', 'missing'), [('sample', 'train'), ('train', 'sample')])
async def test_missing_scopes_are_named(
    page: ConsolePage, make_key: Callable[..., str], console_data: ConsoleData, scope: str, missing: str
) -> None:
    """Buttons for methods that the key may not call are disabled and name the missing scope."""
    await page.log_in(make_key(console_data.tenant_id, scope))
    row = await _row(page, console_data.trained_run)
    needed = {'train': ['Download', 'Push', 'Publish', 'Lifetime of', 'Delete'], 'sample': ['Sample']}
    for verb in needed[missing]:
        button = row.get_by_role('button', name=f'{verb} final, needs the scope {missing}')
        assert await button.is_disabled()
        assert await button.get_attribute('title') == f'Needs the scope {missing}'
    for verb in needed[scope]:
        assert await row.get_by_role('button', name=f'{verb} final, needs').count() == 0
    assert await page.violations() == []
