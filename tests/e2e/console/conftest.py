"""The console on the shared stack: data of two tenants, and a browser."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser

from fixtures.console_browser import ConsolePage, chromium, console_page
from fixtures.console_data import ConsoleData, make_console_data
from twinkle_client.stack import StackState


@pytest.fixture(scope='session')
def console_data(tiny_stack: StackState) -> ConsoleData:
    """Data of two tenants on the shared stack."""
    return make_console_data(tiny_stack.address, tiny_stack.read_api_key(), tiny_stack.base_model)


@pytest_asyncio.fixture(scope='module', loop_scope='module')
async def browser() -> AsyncIterator[Browser]:
    """Chromium, which the tests of a module share."""
    async with chromium() as running:
        yield running


@pytest_asyncio.fixture(loop_scope='module')
async def page(browser: Browser, tiny_stack: StackState) -> AsyncIterator[ConsolePage]:
    """A page without a session. The console must not report errors during the test."""
    async with console_page(browser, tiny_stack.http_url) as opened:
        yield opened
        assert opened.errors == []


@pytest_asyncio.fixture(loop_scope='module')
async def logged_in(page: ConsolePage, console_data: ConsoleData) -> ConsolePage:
    """A page with a session whose key has all scopes."""
    await page.log_in(console_data.key)
    return page


@pytest.fixture
def pictures(request: pytest.FixtureRequest) -> Path | None:
    """Folder for pictures, if the tests have one."""
    return request.config.getoption('--console-pictures')
