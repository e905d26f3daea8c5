"""Runs and checkpoints, in the command line of the real SDK and in the SDK's client without a session."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import tinker

from fixtures.tinker_sdk import SDK_MARKS, new_model, run_program, tokens_of, train
from twinkle_client.stack import StackState

pytestmark = SDK_MARKS


@pytest.fixture(scope='module')
def model(service: tinker.ServiceClient, stack: StackState) -> tinker.TrainingClient:
    """A model with two checkpoints: `first` for training, `shown` for sampling."""
    model = new_model(service, stack, user_metadata={'renderer_name': 'plain'})
    train(model, tokens_of(0))
    model.save_state('first').result()
    model.save_weights_for_sampler('shown').result()
    return model


@pytest.fixture
def spare(service: tinker.ServiceClient, stack: StackState) -> tinker.TrainingClient:
    """A model for a single test."""
    return new_model(service, stack)


def cli(stack: StackState, home: Path, *words: str) -> Any:
    """Run a command of `tinker`, and return its JSON output."""
    done = run_program(['-m', 'tinker.cli', '-f', 'json', *words], stack, home)
    assert done.returncode == 0, done.stderr + done.stdout
    return json.loads(done.stdout)


def test_command_line_lists_models(stack: StackState, tmp_path: Path) -> None:
    """`tinker model list` lists the base model."""
    assert stack.base_model in json.dumps(cli(stack, tmp_path, 'model', 'list'))


def test_command_line_lists_runs(model: tinker.TrainingClient, stack: StackState, tmp_path: Path) -> None:
    """`tinker run list` lists the run, and `run info` shows its base model."""
    assert model.model_id in json.dumps(cli(stack, tmp_path, 'run', 'list', '--limit', '0'))
    printed = json.dumps(cli(stack, tmp_path, 'run', 'info', model.model_id))
    assert stack.base_model in printed


@pytest.mark.slow
def test_command_line_lists_checkpoints(model: tinker.TrainingClient, stack: StackState, tmp_path: Path) -> None:
    """`tinker checkpoint list` lists the checkpoints of a run, and `checkpoint info` shows one checkpoint."""
    printed = json.dumps(cli(stack, tmp_path, 'checkpoint', 'list', '--run-id', model.model_id))
    assert f'tinker://{model.model_id}/weights/first' in printed
    assert f'tinker://{model.model_id}/sampler_weights/shown' in printed
    path = f'tinker://{model.model_id}/weights/first'
    assert path in json.dumps(cli(stack, tmp_path, 'checkpoint', 'info', path))


def test_run_shows_its_properties(rest: tinker.RestClient, model: tinker.TrainingClient, stack: StackState) -> None:
    """A run shows its base model, rank, metadata and newest checkpoints, by id and by checkpoint path."""
    run = rest.get_training_run(model.model_id).result()
    assert (run.training_run_id, run.base_model, run.is_lora, run.lora_rank) == (
        model.model_id,
        stack.base_model,
        True,
        8,
    )
    assert run.user_metadata['renderer_name'] == 'plain'
    assert run.last_checkpoint.checkpoint_id == 'weights/first'
    assert run.last_sampler_checkpoint.checkpoint_id == 'sampler_weights/shown'
    path = f'tinker://{model.model_id}/weights/first'
    assert rest.get_training_run_by_tinker_path(path).result().training_run_id == model.model_id
    page = rest.list_training_runs(limit=1, offset=0).result()
    assert len(page.training_runs) == 1
    assert page.cursor.total_count >= 1


def test_checkpoints_are_listed_with_their_kind_and_size(rest: tinker.RestClient, model: tinker.TrainingClient) -> None:
    """The checkpoints of a run are listed with kind and size, and the list of all runs contains them."""
    own = {item.checkpoint_id: item for item in rest.list_checkpoints(model.model_id).result().checkpoints}
    assert {name: item.checkpoint_type for name, item in own.items()} == {
        'weights/first': 'training',
        'sampler_weights/shown': 'sampler',
    }
    assert own['weights/first'].size_bytes > own['sampler_weights/shown'].size_bytes > 0
    all_checkpoints = rest.list_user_checkpoints(limit=100).result().checkpoints
    assert {item.tinker_path for item in own.values()} <= {item.tinker_path for item in all_checkpoints}


def test_weights_have_a_base_model(rest: tinker.RestClient, model: tinker.TrainingClient, stack: StackState) -> None:
    """A path is enough to find the base model and the rank."""
    info = rest.get_weights_info_by_tinker_path(f'tinker://{model.model_id}/weights/first').result()
    assert (info.base_model, info.is_lora, info.lora_rank) == (stack.base_model, True, 8)


def test_deleted_checkpoint_is_not_found(rest: tinker.RestClient, spare: tinker.TrainingClient) -> None:
    """A deleted checkpoint is not listed or found, and a second deletion raises `NotFoundError`."""
    path = spare.save_state('doomed').result().path
    rest.delete_checkpoint_from_tinker_path(path).result()
    assert 'weights/doomed' not in {
        item.checkpoint_id for item in rest.list_checkpoints(spare.model_id).result().checkpoints
    }
    with pytest.raises(tinker.NotFoundError):
        rest.get_weights_info_by_tinker_path(path).result()
    with pytest.raises(tinker.NotFoundError):
        rest.delete_checkpoint_from_tinker_path(path).result()


def test_checkpoint_expires_after_its_time_to_live(rest: tinker.RestClient, spare: tinker.TrainingClient) -> None:
    """A time to live is listed and can be removed; once it has passed, the checkpoint is deleted."""
    path = spare.save_state('brief', ttl_seconds=3600).result().path
    expires_at = _checkpoint(rest, spare, 'weights/brief').expires_at
    assert timedelta(minutes=50) < expires_at - datetime.now(UTC) <= timedelta(hours=1)
    rest.set_checkpoint_ttl_from_tinker_path(path, None).result()
    assert _checkpoint(rest, spare, 'weights/brief').expires_at is None
    rest.set_checkpoint_ttl_from_tinker_path(path, 1).result()
    while _checkpoint(rest, spare, 'weights/brief') is not None:
        pass
    with pytest.raises(tinker.NotFoundError):
        rest.get_weights_info_by_tinker_path(path).result()


def test_published_checkpoint_is_listed_as_public(rest: tinker.RestClient, model: tinker.TrainingClient) -> None:
    """Publishing or unpublishing a checkpoint changes its entry in the list."""
    path = f'tinker://{model.model_id}/sampler_weights/shown'
    rest.publish_checkpoint_from_tinker_path(path).result()
    assert _checkpoint(rest, model, 'sampler_weights/shown').public
    rest.unpublish_checkpoint_from_tinker_path(path).result()
    assert not _checkpoint(rest, model, 'sampler_weights/shown').public


def test_session_has_its_runs(
    rest: tinker.RestClient, service: tinker.ServiceClient, model: tinker.TrainingClient
) -> None:
    """A session is listed, and shows the runs that were created in it."""
    session_id = service.holder.get_session_id()
    assert session_id in rest.list_sessions(limit=100).result().sessions
    assert model.model_id in rest.get_session(session_id).result().training_run_ids


def test_absent_runs_are_not_found(rest: tinker.RestClient) -> None:
    """Missing runs and sessions, and the checkpoints of a missing run, raise `NotFoundError`."""
    for call in (
        lambda: rest.get_training_run('nobody:train:0'),
        lambda: rest.list_checkpoints('nobody:train:0'),
        lambda: rest.get_session('nobody'),
    ):
        with pytest.raises(tinker.NotFoundError):
            call().result()


def _checkpoint(rest: tinker.RestClient, model: tinker.TrainingClient, checkpoint_id: str) -> Any:
    """Return a checkpoint from the list; None if it is not listed."""
    found = rest.list_checkpoints(model.model_id).result().checkpoints
    return next((item for item in found if item.checkpoint_id == checkpoint_id), None)
