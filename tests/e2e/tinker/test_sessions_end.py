"""The session of a suspended Tinker client expires: its steps are saved, and the client can continue."""

from collections.abc import Iterator

import numpy as np
import pytest
import tinker

from fixtures.tinker_sdk import (
    SDK_MARKS,
    new_model,
    rest_client,
    running_stack,
    scores,
    service_client,
    tokens_of,
    train,
)
from fixtures.tiny_model import build_tiny_model
from twinkle_client.stack import StackState

pytestmark = SDK_MARKS


@pytest.fixture(scope='module')
def expiring_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StackState]:
    """A stack whose sessions expire between two heartbeats of the SDK, which are ten seconds apart."""
    model = build_tiny_model(tmp_path_factory.mktemp('model'), family='qwen3')
    gateway = {'heartbeat_interval': 0.5, 'session_lifetime': 6.0}
    with running_stack(tmp_path_factory.mktemp('hasty'), model, gateway=gateway) as state:
        yield state


@pytest.mark.slow
def test_suspended_client_continues_training(expiring_stack: StackState) -> None:
    """Unsaved steps become a checkpoint that Tinker lists and loads; the model equals one without a suspension."""
    examples = [tokens_of(1), tokens_of(2)]
    with service_client(expiring_stack) as client, rest_client(expiring_stack) as rest:
        undisturbed = new_model(client, expiring_stack)
        losses = train(undisturbed, *examples, steps=4)
        suspended = new_model(client, expiring_stack)
        found = train(suspended, *examples, steps=2)
        run_id = suspended.get_info().model_id
        while not (saved := _saved(rest, run_id)):
            continue
        path = saved[0]
        assert '/weights/session-expired-' in path
        found += train(suspended, *examples, steps=2)
        assert found == losses
        np.testing.assert_array_equal(scores(suspended, *examples), scores(undisturbed, *examples))
        resumed = client.create_training_client_from_state_with_optimizer(path).result()
        # The name has the number of steps at the expiry, which may occur before the second step.
        steps = int(path.partition('session-expired-')[2].partition('-')[0])
        assert steps in {1, 2}
        assert train(resumed, *examples, steps=1) == losses[steps : steps + 1]


def _saved(rest: tinker.RestClient, run_id: str) -> list[str]:
    return [item.tinker_path for item in rest.list_checkpoints(run_id).result().checkpoints]
