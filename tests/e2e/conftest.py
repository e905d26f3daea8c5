"""The stack that end-to-end tests share. A test that kills or reconfigures services starts its own stack."""

import uuid
from collections.abc import Iterator

import pytest

from fixtures.exporting_stack import exporting_stack
from fixtures.tinker_sdk import tracebacks
from fixtures.tiny_model import build_tiny_model
from twinkle_client import TwinkleClient
from twinkle_client.administration import KeyAdministration
from twinkle_client.stack import StackState

TINY_MODEL = 'twinkle/tiny-qwen3'
"""Name of the shared stack's base model, which is an alias of a local folder."""


@pytest.fixture(scope='session')
def tiny_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StackState]:
    """Running stack that all tests share, with a tiny Qwen3 model and the torch engine.

    At the end of the tests, the logs of the stack must not contain a traceback.
    """
    model = build_tiny_model(tmp_path_factory.mktemp('model'), family='qwen3')
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv('TWINKLE_MODEL_ID_ALIASES', f'{TINY_MODEL}={model}')
        folder = tmp_path_factory.mktemp('stack')
        with exporting_stack(folder, TINY_MODEL) as state:
            yield state
        assert tracebacks(folder) == []


@pytest.fixture
def tenant_key(tiny_stack: StackState) -> str:
    """API key of a new tenant on the shared stack."""
    with TwinkleClient(tiny_stack.address, tiny_stack.read_api_key()) as client:
        tenant_id = f'tenant-{uuid.uuid4().hex[:12]}'
        _, secret = KeyAdministration(client=client).create_key(tenant_id, scopes=['train', 'sample', 'data'])
    return secret
