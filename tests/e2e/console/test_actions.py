"""Changes that users make in the console: login by link, samples, checkpoints, undo, keys and quotas."""

from collections.abc import Callable

import httpx
import pytest

from fixtures.console_browser import ConsolePage
from fixtures.console_data import STEPS, ConsoleData
from twinkle_client import TwinkleClient
from twinkle_client.administration import KeyAdministration
from twinkle_client.metrics import RunMetrics
from twinkle_client.stack import StackState

pytestmark = [pytest.mark.asyncio(loop_scope='module'), pytest.mark.timeout(300)]


async def test_a_link_logs_in_once(page: ConsolePage, console_stack: StackState, console_data: ConsoleData) -> None:
    """A link logs in without a key, and cannot be used a second time."""
    async with httpx.AsyncClient(base_url=console_stack.http_url) as http:
        response = await http.post('/console/api/links', headers={'authorization': f'Bearer {console_data.key}'})
    link = response.json()['link']
    await page.open(f'#/login/{link}')
    await page.page.get_by_role('region', name='Session').get_by_text(console_data.tenant_id).wait_for()
    assert link not in page.page.url
    await page.page.get_by_role('button', name='Log out').click()
    await page.page.get_by_label('API key').wait_for()
    await page.open(f'#/login/{link}')
    await page.page.reload()
    await page.page.get_by_role('alert').get_by_text('Not logged in').wait_for()


async def test_the_playground_streams_both_weights(logged_in: ConsolePage, console_data: ConsoleData) -> None:
    """The base model and the run answer the same prompt; the same seed gives the same tokens again."""
    page = logged_in.page
    await logged_in.show(f'#/playground?run={console_data.trained_run}', 'Sample')
    await page.get_by_label('Max. tokens').fill('16')
    answers = []
    for _ in range(2):
        await page.get_by_role('button', name='Sample', exact=True).click()
        await page.get_by_role('region', name='Your weights').get_by_text('Mean log-probability').wait_for()
        await page.get_by_role('button', name='Sample', exact=True).and_(page.locator(':enabled')).wait_for()
        twin = await logged_in.json_twin()
        answers.append([[token['id'] for token in twin[side]] for side in ('base', 'version')])
        assert {token['version'] for token in twin['base']} == {0}
        assert {token['version'] for token in twin['version']} == {2}
    assert answers[0] == answers[1]
    assert answers[0][0] != answers[0][1]
    await page.get_by_role('region', name='Your weights').get_by_role('group').press('ArrowRight')
    await page.get_by_role('columnheader', name='Most likely').wait_for()


async def test_a_refused_sample_shows_its_reason(logged_in: ConsolePage, console_data: ConsoleData) -> None:
    """The error of a refused call shows the server's message, its reason and the id of the call."""
    page = logged_in.page
    await logged_in.show(f'#/playground?run={console_data.trained_run}&version=99', 'Sample')
    await page.get_by_role('button', name='Sample', exact=True).click()
    alert = page.get_by_role('region', name='Your weights').get_by_role('alert')
    await alert.get_by_text('VERSION_NOT_READY').wait_for()
    shown = await alert.inner_text()
    assert '99' in shown
    assert 'Request' in shown


async def test_checkpoints_are_published_and_deleted(
    logged_in: ConsolePage, console_stack: StackState, console_data: ConsoleData
) -> None:
    """A checkpoint is published, unpublished and deleted after a confirmation."""
    page = logged_in.page
    await logged_in.show(f'#/runs/{console_data.trained_run}/versions', 'weights-only')
    row = page.get_by_role('region', name='Checkpoints').get_by_role('row').filter(has_text='weights-only')
    for verb, readers in (('Publish', 'every tenant'), ('Unpublish', 'your tenant')):
        await row.get_by_role('button', name=f'{verb} weights-only').click()
        await page.get_by_role('dialog').get_by_role('button', name=verb, exact=True).click()
        await row.get_by_text(readers).wait_for()
    await row.get_by_role('button', name='Delete weights-only').click()
    await page.get_by_role('dialog').get_by_role('button', name='Cancel').click()
    assert await row.count() == 1
    await row.get_by_role('button', name='Delete weights-only').click()
    await page.get_by_role('dialog').get_by_role('button', name='Delete', exact=True).click()
    await row.wait_for(state='detached')
    with TwinkleClient(console_stack.address, console_data.key) as client:
        names = [checkpoint.name for checkpoint in client.list_checkpoints(console_data.trained_run)]
    assert names == ['final']


async def test_operations_show_errors_and_undo(logged_in: ConsolePage, console_data: ConsoleData) -> None:
    """A failed operation is listed with its message, and an undo reverts a step."""
    page = logged_in.page
    await logged_in.show(f'#/runs/{console_data.trained_run}/operations', 'Queue and device time')
    await page.get_by_label('Only errors').check()
    await page.get_by_role('region', name='Operations').get_by_text('error', exact=True).wait_for()
    await page.get_by_role('button', name='Undo optimizer steps').click()
    await page.get_by_role('dialog').get_by_role('button', name='Undo', exact=True).click()
    await page.get_by_role('dialog').wait_for(state='detached')
    await page.get_by_label('Only errors').uncheck()
    await page.get_by_role('region', name='Operations').get_by_text(f'step {STEPS - 1}').first.wait_for()
    # All results arrived on one stream.
    assert [request.url for request in logged_in.requests if 'WatchOperations' in request.url] == [
        f'{logged_in.url}/console/rpc/twinkle.api.model.v1.TrainingService/WatchOperations'
    ]


async def test_keys_are_created_rotated_and_revoked(logged_in: ConsolePage, console_data: ConsoleData) -> None:
    """A new key's secret is shown once and works, its successor works too, and a revoked key is refused."""
    page = logged_in.page
    await logged_in.show(f'#/admin/{console_data.other_tenant}', 'Save the quota')
    await page.get_by_role('button', name='New key').click()
    await page.get_by_label('Name (optional)').fill('from the console')
    await page.get_by_role('dialog').get_by_role('button', name='Create', exact=True).click()
    secret = await page.get_by_role('dialog').locator('code').inner_text()
    await page.get_by_role('button', name='Done').click()
    assert secret not in await page.content()
    row = page.get_by_role('region', name='Keys').get_by_role('row').filter(has_text='from the console')
    assert await _status(logged_in, secret) == 200
    await row.get_by_role('button', name='Rotate').click()
    await page.get_by_role('dialog').get_by_role('button', name='Rotate', exact=True).click()
    successor = await page.get_by_role('dialog').locator('code').inner_text()
    await page.get_by_role('button', name='Done').click()
    assert await _status(logged_in, successor) == 200
    await row.filter(has_text='replaces').get_by_role('button', name='Revoke').click()
    await page.get_by_role('dialog').get_by_role('button', name='Revoke', exact=True).click()
    await row.get_by_text('revoked').wait_for()
    assert await _status(logged_in, successor) == 401


async def test_curves_follow_a_program(
    logged_in: ConsolePage, console_stack: StackState, console_data: ConsoleData
) -> None:
    """A point that a program logs appears in an open page."""
    await logged_in.show(f'#/runs/{console_data.trained_run}', 'reward/mean')
    chart = logged_in.page.locator('figure').filter(has_text='reward/mean')
    assert await chart.get_attribute('data-points') == str(STEPS)
    with TwinkleClient(console_stack.address, console_data.key) as client:
        await RunMetrics(console_data.trained_run, client=client).log.aio({'reward/mean': 0.125}, step=STEPS + 1)
    await chart.get_by_text('0.125').wait_for()
    assert await chart.get_attribute('data-points') == str(STEPS + 1)


async def test_a_revoked_key_ends_the_session(
    page: ConsolePage, make_key: Callable[..., str], console_stack: StackState, console_data: ConsoleData
) -> None:
    """If its key is revoked, a page returns to the login and states the reason."""
    secret = make_key(console_data.tenant_id, 'train')
    await page.log_in(secret)
    with TwinkleClient(console_stack.address, console_stack.read_api_key()) as admin:
        keys = KeyAdministration(client=admin)
        (key,) = [key for key in keys.list_keys(console_data.tenant_id) if key.key_id in secret]
        keys.revoke_key(key.key_id)
    await page.page.get_by_text('The session has ended').wait_for()
    assert await page.page.get_by_label('API key').is_visible()


async def test_versions_are_pinned(logged_in: ConsolePage, console_data: ConsoleData) -> None:
    """A version is pinned and unpinned, and a pinned version cannot be deleted."""
    page = logged_in.page
    await logged_in.show(f'#/runs/{console_data.trained_run}/versions', 'with optimizer')
    row = page.get_by_role('region', name='Versions').get_by_role('row').nth(2)
    await row.get_by_role('button', name='Pin version 1').click()
    await row.get_by_text('pinned', exact=True).wait_for()
    assert await row.get_by_role('button', name='Delete version 1').is_disabled()
    await row.get_by_role('button', name='Unpin version 1').click()
    await row.get_by_role('button', name='Pin version 1', exact=True).wait_for()


async def test_quotas_are_set(logged_in: ConsolePage, console_data: ConsoleData) -> None:
    """A limit is stored, is shown after a reload, and returns to the default when it is cleared."""
    page = logged_in.page
    await logged_in.show(f'#/admin/{console_data.other_tenant}', 'Save the quota')
    for value in ('7', ''):
        await page.get_by_label('Adapters at a time').fill(value)
        await page.get_by_label('Stored values of metrics').fill(value)
        await page.get_by_role('button', name='Save the quota').click()
        await page.get_by_text('Saved.').wait_for()
        await page.reload()
        await page.get_by_label('Adapters at a time').wait_for()
        for label in ('Adapters at a time', 'Stored values of metrics'):
            assert await page.get_by_label(label).input_value() == value


async def _status(page: ConsolePage, key: str) -> int:
    """Return the status of a login with a key; the page's session stays unchanged."""
    async with httpx.AsyncClient(base_url=page.url) as http:
        return (await http.post('/console/api/login', json={'key': key})).status_code
