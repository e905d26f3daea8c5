"""The stack that the Tinker SDK is driven against, and a session for each module."""

import gc
from collections.abc import Iterator

import pytest
import tinker

from fixtures.tinker_sdk import rest_client, running_stack, service_client
from fixtures.tiny_model import build_tiny_model
from twinkle_client.stack import StackState

NAME = 'twinkle/tiny-qwen3'
"""Of the base model, as clients ask for it."""


@pytest.fixture(scope='module', autouse=True)
def _nothing_left() -> Iterator[None]:
    """Collect what the SDK leaves where its own modules alone see it."""
    yield
    gc.collect()


@pytest.fixture(scope='session')
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StackState]:
    """A running stack with a tiny model, under a name that no hub knows."""
    model = build_tiny_model(tmp_path_factory.mktemp('model'), family='qwen3')
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv('TWINKLE_MODEL_ID_ALIASES', f'{NAME}={model}')
        with running_stack(tmp_path_factory.mktemp('stack'), NAME) as state:
            yield state


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
