"""The shared stack as the Tinker SDK sees it, and one session per test module."""

import gc
from collections.abc import Iterator

import pytest
import tinker

from fixtures.tinker_sdk import rest_client, service_client
from twinkle_client.stack import StackState


@pytest.fixture(scope='module', autouse=True)
def _nothing_left() -> Iterator[None]:
    """Collect what the SDK leaves where its own modules alone see it."""
    yield
    gc.collect()


@pytest.fixture(scope='session')
def stack(tiny_stack: StackState) -> StackState:
    """Stack that the SDK talks to: the shared one."""
    return tiny_stack


@pytest.fixture(scope='module')
def service(stack: StackState) -> Iterator[tinker.ServiceClient]:
    """A session."""
    with service_client(stack) as client:
        yield client


@pytest.fixture(scope='session')
def rest(stack: StackState) -> Iterator[tinker.RestClient]:
    """The client without a session, which all modules share."""
    with rest_client(stack) as client:
        yield client
    gc.collect()
