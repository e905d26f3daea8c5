"""The shared stack for the Tinker SDK, and one session for each test module."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import tinker

from fixtures.tinker_sdk import rest_client, service_client
from twinkle.hub import resolve_tokenizer
from twinkle_client.stack import StackState


@pytest.fixture(scope='module', autouse=True)
def _collect_garbage() -> Iterator[None]:
    """Run the garbage collector in the module that created the SDK's garbage."""
    yield
    gc.collect()


@pytest.fixture(scope='session')
def stack(tiny_stack: StackState) -> StackState:
    """The shared stack."""
    return tiny_stack


@pytest.fixture
def local_tokenizer(stack: StackState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the tokenizer into the working folder under the base model's name, so that no hub is needed."""
    folder = tmp_path / stack.base_model
    folder.parent.mkdir(parents=True)
    folder.symlink_to(resolve_tokenizer(stack.base_model))
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope='module')
def service(stack: StackState) -> Iterator[tinker.ServiceClient]:
    """A client with a session."""
    with service_client(stack) as client:
        yield client


@pytest.fixture(scope='session')
def rest(stack: StackState) -> Iterator[tinker.RestClient]:
    """A client without a session, shared by all modules."""
    with rest_client(stack) as client:
        yield client
    gc.collect()
