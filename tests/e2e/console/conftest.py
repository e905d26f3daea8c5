"""Fixtures for the console on a running stack: data of two tenants, and a browser."""

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser

from fixtures.console_browser import ConsolePage, chromium, console_page
from fixtures.console_data import ConsoleData, make_console_data
from fixtures.exporting_stack import exporting_stack
from twinkle_client import TwinkleClient
from twinkle_client.administration import KeyAdministration
from twinkle_client.stack import StackState
from twinkle_client.tracing import tracing_to


@pytest.fixture(scope='session')
def console_stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StackState]:
    """The shared stack, or a stack with the model of the option `--console-model`."""
    model = request.config.getoption('--console-model')
    if model is None:
        yield request.getfixturevalue('tiny_stack')
        return
    with exporting_stack(tmp_path_factory.mktemp('console'), model) as state:
        yield state


@pytest.fixture(scope='session')
def console_data(console_stack: StackState) -> ConsoleData:
    """Data of two tenants on the stack."""
    with tracing_to(console_stack.state_dir / 'traces'):
        return make_console_data(console_stack.address, console_stack.read_api_key(), console_stack.base_model)


@pytest.fixture(scope='session')
def make_key(console_stack: StackState) -> Callable[..., str]:
    """Function that creates a key for a tenant, with the given scopes, and returns the secret."""

    def make(tenant_id: str, *scopes: str) -> str:
        with TwinkleClient(console_stack.address, console_stack.read_api_key()) as client:
            return KeyAdministration(client=client).create_key(tenant_id, scopes=scopes)[1]

    return make


@pytest_asyncio.fixture(scope='module', loop_scope='module')
async def browser() -> AsyncIterator[Browser]:
    """Chromium, which the tests of a module share."""
    async with chromium() as running:
        yield running


@pytest_asyncio.fixture(loop_scope='module')
async def page(browser: Browser, console_stack: StackState) -> AsyncIterator[ConsolePage]:
    """A page without a session. The console must not report errors during the test."""
    async with console_page(browser, console_stack.http_url) as opened:
        yield opened
        assert opened.errors == []


@pytest_asyncio.fixture(loop_scope='module')
async def logged_in(page: ConsolePage, console_data: ConsoleData) -> ConsolePage:
    """A page with a session whose key has all scopes."""
    await page.log_in(console_data.key)
    return page


@pytest.fixture
def pictures(request: pytest.FixtureRequest) -> Path | None:
    """Folder for pictures; None without the option `--console-pictures`."""
    return request.config.getoption('--console-pictures')
