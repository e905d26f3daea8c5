"""The Tinker backend of an unmodified Trinity-RFT trains, saves, and continues in a new process."""

import gc
import math
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import tinker

from e2e.trinity.project import Metrics, Project
from fixtures.tinker_sdk import SDK_MARKS, rest_client, sdk_address
from twinkle.hub import resolve_tokenizer
from twinkle_client import TwinkleClient
from twinkle_client.administration import KeyAdministration
from twinkle_client.stack import StackState

pytestmark = [pytest.mark.timeout(900), *SDK_MARKS, pytest.mark.slow]

FIRST, LAST = 3, 5
"""Last step of the first run, and last step of the run that continues it."""


@dataclass(frozen=True)
class Runs:
    """A run of a project, and a run that resumes it."""

    project: Project
    first: dict[int, Metrics]
    second: dict[int, Metrics]


@pytest.fixture(scope='module')
def api_key(tiny_stack: StackState) -> str:
    """API key of a new tenant."""
    with TwinkleClient(tiny_stack.address, tiny_stack.read_api_key()) as client:
        tenant_id = f'trinity-{uuid.uuid4().hex[:12]}'
        _, secret = KeyAdministration(client=client).create_key(tenant_id, scopes=['train', 'sample', 'data'])
    return secret


@pytest.fixture(scope='module')
def runs(tiny_stack: StackState, api_key: str, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """A run of three steps, and a run of two more steps that starts from its checkpoint."""
    folder = tmp_path_factory.mktemp('trinity')
    project = Project(folder, tiny_stack.base_model, {**sdk_address(tiny_stack), 'api_key': api_key})
    project.prepare(resolve_tokenizer(tiny_stack.base_model))
    first = project.run(total_steps=FIRST)
    return Runs(project, first, project.run(total_steps=LAST))


@pytest.fixture(scope='module')
def rest(tiny_stack: StackState, api_key: str) -> Iterator[tinker.RestClient]:
    """A client of the same tenant."""
    with rest_client(tiny_stack, api_key=api_key) as client:
        yield client
    gc.collect()


def test_three_steps_train(runs: Runs) -> None:
    """Three steps have finite metrics and gradients, and the explorer samples from trained weights."""
    assert list(runs.first) == [1, 2, 3]
    assert all(math.isfinite(value) for metrics in runs.first.values() for value in metrics.values())
    assert max(metrics['grad_norm:mean'] for metrics in runs.first.values()) > 0
    assert runs.first[3]['sample/model_version/mean'] >= 1


def test_sampled_and_trained_log_probabilities_are_equal(runs: Runs) -> None:
    """Explorer and trainer agree on the policy of the first step, which is the base model."""
    assert runs.first[1]['actor/ppo_kl'] == pytest.approx(0, abs=1e-5)
    assert runs.first[1]['actor/kl_loss'] == pytest.approx(0, abs=1e-5)


def test_a_second_run_continues_at_step_four(runs: Runs) -> None:
    """The second run takes steps 4 and 5; explorer and trainer both start from the trained weights of step 3."""
    assert list(runs.second) == [4, 5]
    assert all(math.isfinite(value) for metrics in runs.second.values() for value in metrics.values())
    assert runs.second[4]['sample/model_version/mean'] == FIRST
    assert runs.second[4]['actor/ppo_kl'] == pytest.approx(0, abs=1e-5)
    assert runs.second[4]['actor/kl_loss'] > 1e-3


def test_checkpoints_are_saved_in_the_gateway(runs: Runs, rest: tinker.RestClient) -> None:
    """Each run has saved its last state and the explorer's last weights, at the paths that Trinity recorded."""
    found: set[str] = set()
    for run in rest.list_training_runs().result().training_runs:
        found |= {item.tinker_path for item in rest.list_checkpoints(run.training_run_id).result().checkpoints}
    saved = {runs.project.saved_path(step, kind) for step in (FIRST, LAST) for kind in ('checkpoint', 'sampler')}
    assert len(saved) == 4
    assert saved <= found
