"""The console shows only data of the session's tenant, and no data without a session."""

from collections.abc import Callable

import pytest
from playwright.async_api import APIResponse, Browser, Request

from fixtures.console_browser import ConsolePage, console_page
from fixtures.console_data import SECRET_FOLDER, SECRET_TEXT, ConsoleData
from twinkle_client.stack import StackState

pytestmark = [pytest.mark.asyncio(loop_scope='module'), pytest.mark.timeout(300)]

TENANT_PAGES = {
    '#/overview': 'in 24 hours',
    '#/runs': 'sft-high-rate',
    '#/runs/{trained_run}': 'Ask again',
    '#/runs/{rollout_run}/rollouts': 'Mean of letters',
    '#/runs/{trained_run}/operations': 'Queue and device time',
    '#/runs/{trained_run}/versions': 'with optimizer',
    '#/runs/{trained_run}/configuration': 'AdamW',
    '#/playground': 'Sample',
    '#/data': 'input_ids',
    '#/data/{dataset_id}': 'tokens, ',
    '#/data/{lazy_dataset}': 'cannot be read',
    '#/traces': 'gateway',
    '#/traces/{shared_trace}': 'shared with',
    '#/usage': 'Usage by run',
}
"""Addresses of the tenant's pages, each with a text that the page shows once its data are loaded."""
PAGES_OF_SCOPES = {
    'sample': ['Overview', 'Runs', 'Playground', 'Traces', 'Usage'],
    'operator': ['Overview', 'Runs', 'Traces', 'Usage', 'Fleet'],
    'admin': ['Overview', 'Runs', 'Traces', 'Usage', 'Administration'],
}
UNAUTHENTICATED = 16
"""Status code of gRPC."""


async def test_a_wrong_key_is_refused(page: ConsolePage) -> None:
    """A key that does not exist is refused with the server's reason, and the login page stays open."""
    await page.open()
    await page.page.get_by_label('API key').fill('tml-wrong')
    await page.page.get_by_role('button', name='Log in').click()
    await page.page.get_by_role('alert').get_by_text('CREDENTIALS_INVALID').wait_for()
    assert await page.page.get_by_label('API key').is_visible()
    assert await page.page.context.cookies() == []


async def test_a_session_ends_with_the_logout(logged_in: ConsolePage, console_data: ConsoleData) -> None:
    """The page names the session's tenant; a reload keeps the session, and the logout ends it."""
    page = logged_in.page
    await page.reload()
    await page.get_by_role('region', name='Session').get_by_text(console_data.tenant_id).wait_for()
    await page.get_by_role('button', name='Log out').click()
    await page.get_by_label('API key').wait_for()
    assert await page.context.cookies() == []
    await page.reload()
    await page.get_by_label('API key').wait_for()


@pytest.mark.parametrize('scope', PAGES_OF_SCOPES)
async def test_scopes_determine_the_pages(
    page: ConsolePage, make_key: Callable[..., str], console_data: ConsoleData, scope: str
) -> None:
    """The navigation lists only pages whose methods the key may call."""
    await page.log_in(make_key(console_data.tenant_id, scope))
    links = page.page.get_by_role('navigation', name='Pages').get_by_role('link')
    assert await links.all_inner_texts() == PAGES_OF_SCOPES[scope]


async def test_other_tenants_are_absent(
    page: ConsolePage, make_key: Callable[..., str], console_data: ConsoleData
) -> None:
    """No page of a tenant contains another tenant's ids or names, in its text or in its JSON."""
    await page.log_in(make_key(console_data.tenant_id, 'train', 'sample', 'data'))
    others = [console_data.other_run, console_data.other_dataset, console_data.other_tenant, console_data.other_trace]
    others += [console_data.other_lazy_dataset, console_data.other_trace[:12]]
    hidden = [*others, 'secret-run', SECRET_TEXT, SECRET_FOLDER]
    for address, expected in TENANT_PAGES.items():
        await page.show(address.format_map(vars(console_data)), expected)
        shown = await page.page.content() + str(await page.json_twin())
        assert [text for text in hidden if text in shown] == [], address
    await page.show(f'#/runs/{console_data.other_run}', 'RUN_NOT_FOUND')
    await page.show(f'#/runs/{console_data.other_run}/rollouts', 'RUN_NOT_FOUND')
    await page.show(f'#/data/{console_data.other_dataset}', 'DATASET_NOT_FOUND')
    await page.show(f'#/data/{console_data.other_lazy_dataset}', 'DATASET_NOT_FOUND')
    await page.show(f'#/traces/{console_data.other_trace}', 'TRACE_NOT_FOUND')
    await page.show(f'#/traces?run={console_data.other_run}', 'No trace matches the filters')


async def test_no_request_succeeds_without_a_session(
    browser: Browser, logged_in: ConsolePage, console_data: ConsoleData, console_stack: StackState
) -> None:
    """Every request of the pages goes to the gateway; without the cookie, requests for data are refused."""
    pages = {**TENANT_PAGES, '#/fleet': 'Live versions', '#/admin/{tenant_id}': 'Save the quota'}
    for address, expected in pages.items():
        await logged_in.show(address.format_map(vars(console_data)), expected)
    recorded = {request.url: request for request in logged_in.requests}
    assert {url.split('/console/')[0] for url in recorded} == {console_stack.http_url}
    calls = [request for url, request in recorded.items() if '/console/rpc/' in url]
    assert len(calls) > len(pages)
    async with console_page(browser, console_stack.http_url) as anonymous:
        for call in calls:
            response = await _repeat(anonymous, call)
            assert (call.url, await _status(response)) == (call.url, UNAUTHENTICATED)
        session = await anonymous.page.request.get(f'{console_stack.http_url}/console/api/session')
        assert session.status == 401


async def _repeat(page: ConsolePage, call: Request) -> APIResponse:
    headers = {name: value for name, value in call.headers.items() if name != 'cookie'}
    return await page.page.request.post(call.url, headers=headers, data=call.post_data_buffer or b'')


async def _status(response: APIResponse) -> int:
    """Return the status of a call, from the headers or from the trailers in the body."""
    if 'grpc-status' in response.headers:
        return int(response.headers['grpc-status'])
    return int((await response.body()).split(b'grpc-status:')[1].split(b'\r\n')[0])


async def test_all_actions_work_with_the_keyboard(page: ConsolePage, console_data: ConsoleData) -> None:
    """Login, navigation, the cursor of a chart and logout work with only the keyboard, and the focus is visible."""
    keyboard = page.page.keyboard
    await page.open()
    await page.page.get_by_label('API key').wait_for()
    await keyboard.type(console_data.key)
    await keyboard.press('Enter')
    await page.page.get_by_role('link', name='sft-cosine').wait_for()
    await _tab_to(page, 'sft-cosine')
    await keyboard.press('Enter')
    await page.page.get_by_role('heading', name='sft-cosine').wait_for()
    await page.page.get_by_role('application').first.wait_for()
    await _tab_to(page, 'chart')
    await keyboard.press('ArrowLeft')
    await page.page.locator('figure').get_by_text('step ').first.wait_for()
    await keyboard.press('+')
    await page.page.get_by_role('button', name='All steps').and_(page.page.locator(':enabled')).wait_for()
    await _tab_to(page, 'Operations', is_backwards=True)
    await keyboard.press('Enter')
    await page.page.get_by_role('button', name='Undo optimizer steps').wait_for()
    await _tab_to(page, 'Log out', is_backwards=True)
    await keyboard.press('Enter')
    await page.page.get_by_label('API key').wait_for()


async def _tab_to(page: ConsolePage, name: str, *, is_backwards: bool = False) -> None:
    """Move the focus with Tab to an element with this text or role description."""
    for _ in range(120):
        await page.page.keyboard.press('Shift+Tab' if is_backwards else 'Tab')
        focused = await page.page.evaluate(
            '[document.activeElement.innerText, document.activeElement.ariaRoleDescription]'
        )
        if name in focused:
            outline = await page.page.evaluate('getComputedStyle(document.activeElement).outlineStyle')
            assert outline == 'solid', f'the focus on {name} is not visible'
            return
    raise AssertionError(f'Tab does not reach {name!r}')
