"""The five services that `twinkle up` starts with a tiny model: use, stops, restarts and failed starts."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from fixtures.tiny_model import MAX_POSITIONS, build_tiny_model
from twinkle.data_format import LoraConfig
from twinkle.dataset import Dataset as LocalDataset
from twinkle.telemetry import read_spans
from twinkle_client import NotFoundError, TwinkleClient, UsageError
from twinkle_client.cli import app
from twinkle_client.dataloader import DataLoader
from twinkle_client.dataset import Dataset, DatasetMeta
from twinkle_client.metrics import MetricSeries
from twinkle_client.model import MultiLoraTransformersModel
from twinkle_client.sampler import Sampler
from twinkle_client.stack import SERVICES, StackError, StackOptions, StackState, revive_stack, start_stack, stop_stack
from twinkle_client.stack.process_ids import end_process

pytestmark = pytest.mark.timeout(300)
CHATS = [
    {'messages': [{'role': 'user', 'content': f'say {word}'}, {'role': 'assistant', 'content': word}]}
    for word in ('one', 'two', 'three', 'four', 'five', 'six')
]


@pytest.fixture(scope='module')
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StackState]:
    """Running stack with a tiny model and the torch engine, which starts faster than vLLM."""
    model = build_tiny_model(tmp_path_factory.mktemp('model'))
    folder = tmp_path_factory.mktemp('stack')
    options = StackOptions(state_dir=folder, base_model=str(model), engine='torch')
    yield start_stack(options, report=_silent)
    stop_stack(folder, report=_silent)


@pytest.fixture
def client(stack: StackState) -> Iterator[TwinkleClient]:
    """Client with the administrator key."""
    with TwinkleClient(stack.address, stack.read_api_key()) as client:
        yield client


def test_every_service_is_reported(stack: StackState, client: TwinkleClient) -> None:
    """The gateway and `twinkle status` report all five services."""
    assert client.health_check()
    assert {service.service for service in client.get_server_info().services} == set(SERVICES)
    result = CliRunner().invoke(app, ['status', '--state-dir', str(stack.state_dir)])
    assert result.exit_code == 0
    assert result.output.count('serving') == len(SERVICES)


def test_second_start_changes_nothing(stack: StackState) -> None:
    """A second start of a running stack returns its state."""
    options = StackOptions(state_dir=stack.state_dir, base_model=stack.base_model)
    assert start_stack(options, report=_silent) == StackState.load(stack.state_dir)


def test_secrets_are_private(stack: StackState) -> None:
    """Only the owner can read the key, the configurations and the folder."""
    private = [stack.state_dir / 'api_key', *(stack.state_dir / 'config').iterdir()]
    assert [path for path in private if path.stat().st_mode & 0o077] == []
    assert stack.state_dir.stat().st_mode & 0o077 == 0


def test_training_loop_learns(stack: StackState, client: TwinkleClient) -> None:
    """A loop with a remote dataset lowers the loss; trainer and sampler agree on the published version."""
    dataset = Dataset(DatasetMeta(data=CHATS), client=client)
    dataset.set_template('Template', model_id=stack.base_model, max_length=128)
    dataset.encode()
    assert len(dataset) == len(CHATS)
    model = MultiLoraTransformersModel(stack.base_model, client=client)
    run_id = model.add_adapter_to_model('default', LoraConfig(r=4, seed=7))
    model.set_optimizer('AdamW', lr=2e-2)
    losses: list[float] = []
    for batch in DataLoader(dataset, batch_size=3, shuffle=True, seed=0, epochs=8):
        losses.append(model.forward_backward(batch)['loss'])
        model.clip_grad_and_step(1.0)
    assert np.mean(losses[-2:]) < np.mean(losses[:2])
    assert model.calculate_metric()['step_count'] == len(losses)
    found = _stored_metrics(model, 'train/loss', length=len(losses))
    assert found['train/loss'].steps == list(range(1, len(losses) + 1))
    assert found['train/loss'].values == losses
    assert {'train/grad_norm', 'train/learning_rate', 'train/device_seconds', 'train/token_count'} <= found.keys()
    version = model.publish_version()
    sampler = Sampler(stack.base_model, client=client)
    prompt = {'messages': CHATS[0]['messages'][:1]}
    sequence = sampler.sample(prompt, {'max_tokens': 6, 'temperature': 0}, 'default', version=version).sequences[0]
    assert [span.version for span in sequence.version_spans] == [version]
    trained = model.forward_only([sequence.new_input_feature])['logps'][0]
    sampled = [candidates[0][1] for candidates in sequence.logprobs]
    np.testing.assert_allclose(trained[trained != 0], sampled, atol=1e-4)
    assert client.get_training_run(run_id).run_id == run_id


def _stored_metrics(model: MultiLoraTransformersModel, name: str, *, length: int) -> dict[str, MetricSeries]:
    """Return a run's metrics once the metric has this length; the test's timeout limits the wait."""
    while True:
        found = model.metrics().get()
        if name in found and found[name].point_count >= length:
            return found


def test_resumed_loop_continues_after_its_last_batch(stack: StackState, client: TwinkleClient) -> None:
    """A loop that resumes from a checkpoint with weights, optimizer and cursor has bitwise the same later losses."""
    dataset = Dataset(DatasetMeta(data=CHATS), client=client)
    dataset.set_template('Template', model_id=stack.base_model, max_length=128)
    dataset.encode()
    model = MultiLoraTransformersModel(stack.base_model, client=client)
    path, losses, resumed_losses = '', list[float](), list[float]()
    loader = DataLoader(dataset, batch_size=2, shuffle=True, seed=5, epochs=2)
    model.add_adapter_to_model('steady', LoraConfig(r=4, seed=1, lora_dropout=0.1))
    for batch in loader:
        losses.append(model.forward_backward(batch)['loss'])
        model.clip_grad_and_step()
        if len(losses) == 4:
            consumed = loader.get_state()['consumed_train_samples']
            path = model.save('fourth', save_optimizer=True, consumed_train_samples=consumed)
    resumed = MultiLoraTransformersModel(stack.base_model, client=client)
    resumed.add_adapter_to_model('resumed', LoraConfig(r=4, seed=2, lora_dropout=0.1))
    counters = resumed.resume_from_checkpoint(path)
    assert counters == {'cur_step': 4, 'gradient_accumulation_steps': 1, 'consumed_train_samples': 8}
    resumed_loader = DataLoader(dataset, batch_size=2, shuffle=True, seed=5, epochs=2)
    resumed_loader.resume_from_checkpoint(counters['consumed_train_samples'])
    for batch in resumed_loader:
        resumed_losses.append(resumed.forward_backward(batch)['loss'])
        resumed.clip_grad_and_step()
    assert resumed_losses == losses[4:]


def test_batch_handles_give_the_losses_of_batches(stack: StackState, client: TwinkleClient) -> None:
    """Training with batch handles gives bitwise the same losses as training with batches, and can resume."""
    dataset = Dataset(DatasetMeta(data=CHATS), client=client)
    dataset.set_template('Template', model_id=stack.base_model, max_length=128)
    dataset.encode()
    losses: dict[str, list[float]] = {}
    for name in ('batches', 'handles'):
        model = MultiLoraTransformersModel(stack.base_model, client=client)
        model.add_adapter_to_model(name, LoraConfig(r=4, seed=1, lora_dropout=0.1))
        loader = DataLoader(dataset, batch_size=4, shuffle=True, seed=5, epochs=2)
        outputs = []
        for batch in loader.batches() if name == 'batches' else loader.handles():
            outputs.append(model.forward_backward(batch))
            model.clip_grad_and_step()
        losses[name] = [output['loss'] for output in outputs]
    assert losses['handles'] == losses['batches']
    assert [output['next_cursor']['consumed_train_samples'] for output in outputs] == [4, 6, 10, 12]
    resumed_loader = DataLoader(dataset, batch_size=4, shuffle=True, seed=5, epochs=2)
    resumed_loader.resume_from_checkpoint(outputs[2]['next_cursor'])
    assert len(list(resumed_loader)) == 1


def test_rows_are_added_mixed_and_saved(stack: StackState, client: TwinkleClient, tmp_path: Path) -> None:
    """Adding, mixing and saving rows gives the same file in the data service as in process."""
    saved = []
    for kind, options in ((Dataset, {'client': client}), (LocalDataset, {})):
        parts = [DatasetMeta(data=[{'n': number} for number in range(begin, begin + 3)]) for begin in (0, 10)]
        dataset: Any = kind(parts[0], **options)
        dataset.add_dataset(parts[1])
        dataset.mix_dataset(interleave=True)
        path = tmp_path / f'{kind.__module__}.jsonl'
        dataset.save_as(path)
        saved.append([json.loads(line)['n'] for line in path.read_text().splitlines()])
        assert len(dataset) == 6
    assert saved[0] == saved[1] == [0, 10, 1, 11, 2, 12]


def test_checkpoint_can_be_resumed_downloaded_and_deleted(
    stack: StackState, client: TwinkleClient, tmp_path: Path
) -> None:
    """A saved state is resumed by another adapter, downloaded as a peft folder, and not found after its deletion."""
    model = MultiLoraTransformersModel(stack.base_model, client=client)
    run_id = model.add_adapter_to_model('a', LoraConfig(r=4, seed=1))
    feature = {'input_ids': [1, 2, 3, 4], 'labels': [2, 3, 4, -100]}
    model.forward_backward(feature)
    model.clip_grad_and_step()
    path = model.save('step-1', save_optimizer=True, consumed_train_samples=8)
    assert client.get_latest_checkpoint_path(run_id) == path == client.get_checkpoint_path(run_id, 'step-1')
    folder = client.download_checkpoint(path, tmp_path / 'adapter')
    assert {'adapter_config.json', 'adapter_model.safetensors'} <= {item.name for item in folder.iterdir()}
    model.add_adapter_to_model('b', LoraConfig(r=4, seed=2))
    counters = model.resume_from_checkpoint(path, adapter_name='b')
    assert (counters['cur_step'], counters['consumed_train_samples']) == (1, 8)
    original, resumed = (model.forward_only(feature, adapter_name=name)['logps'][0] for name in ('a', 'b'))
    np.testing.assert_array_equal(original, resumed)
    client.delete_checkpoint(path)
    with pytest.raises(NotFoundError):
        client.get_checkpoint(path)


def test_pipelined_steps_equal_sequential_steps(stack: StackState, client: TwinkleClient) -> None:
    """Steps that are pipelined on one stream give results bitwise equal to those of sequential steps."""
    model = MultiLoraTransformersModel(stack.base_model, client=client)
    feature = {'input_ids': [5, 6, 7, 8], 'labels': [6, 7, 8, -100]}
    for name in ('waiting', 'pipelined'):
        model.add_adapter_to_model(name, LoraConfig(r=4, seed=3))
        model.set_optimizer('AdamW', lr=1e-2, adapter_name=name)
    for _ in range(3):
        model.forward_backward(feature, adapter_name='waiting')
        model.clip_grad_and_step(adapter_name='waiting')
    with model.pipeline(adapter_name='pipelined'):
        futures = [
            call
            for _ in range(3)
            for call in (
                model.forward_backward.submit(feature, adapter_name='pipelined'),
                model.clip_grad_and_step.submit(adapter_name='pipelined'),
            )
        ]
    assert all(future.exception(timeout=60) is None for future in futures)
    first, second = (model.forward_only(feature, adapter_name=name)['logps'][0] for name in ('waiting', 'pipelined'))
    np.testing.assert_array_equal(first, second)


def test_refused_operation_leaves_the_adapter_usable(stack: StackState, client: TwinkleClient) -> None:
    """The error for a refused batch names the field, and the next operation succeeds with the next sequence number."""
    model = MultiLoraTransformersModel(stack.base_model, client=client)
    model.add_adapter_to_model('x')
    before = model.get_adapter().sequence_number
    with pytest.raises(UsageError) as caught:
        model.forward_backward({'input_ids': [-5, 2], 'labels': [2, -100]})
    assert caught.value.reason == 'INVALID_FIELD'
    assert 'input_ids' in caught.value.violations[0].field
    model.forward_backward({'input_ids': [5, 2], 'labels': [2, -100]})
    assert model.get_adapter().sequence_number == before + 1


def test_command_line_samples(stack: StackState) -> None:
    """`twinkle sample` streams an answer and writes a trace."""
    arguments = ['sample', 'hello', '--max-tokens', '4', '--state-dir', str(stack.state_dir)]
    command = [sys.executable, '-m', 'twinkle_client.cli', *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert 'tokens/s' in result.stdout
    assert any(span.service == 'client' for span in read_spans(stack.state_dir / 'traces'))


@pytest.mark.slow
def test_patches_are_applied_by_trainer_and_sampler(tmp_path: Path) -> None:
    """Trainer and sampler apply and report a patch of the stack's options."""
    model = str(build_tiny_model(tmp_path / 'model'))
    options = StackOptions(
        state_dir=tmp_path / 'stack',
        base_model=model,
        patches={'RopeScalingPatch': {'factor': 2.0}},
        services={'sampler': {'torch': {'max_num_seqs': 8}}},
    )
    patched = start_stack(options, report=_silent)
    try:
        with TwinkleClient(patched.address, patched.read_api_key()) as client:
            listed = [model for service in client.get_server_info().services for model in service.base_models]
    finally:
        stop_stack(options.state_dir, report=_silent)
    models = [model for model in listed if model.is_trainable != model.is_sampleable]
    assert len(models) == 2
    assert {model.context_tokens for model in models} == {2 * MAX_POSITIONS}
    assert [[(patch.name, dict(patch.options)) for patch in model.patches] for model in models] == [
        [('RopeScalingPatch', {'factor': 2.0})]
    ] * 2


def test_killed_service_is_restarted_at_its_address(stack: StackState, client: TwinkleClient) -> None:
    """A killed service is restarted at its address with its data, and the other services keep running."""
    dataset = Dataset(DatasetMeta(data=CHATS), client=client)
    dataset.set_template('Template', model_id=stack.base_model, max_length=128)
    dataset.encode()
    before = StackState.load(stack.state_dir)
    assert before is not None
    killed = next(service for service in before.services if service.name == 'data')
    os.kill(killed.pid, signal.SIGKILL)
    assert end_process(killed.pid, killed.start_mark, grace_seconds=10)
    after = revive_stack(stack.state_dir, report=_silent)
    assert after is not None
    assert after.is_running()
    pairs = list(zip(before.services, after.services, strict=True))
    assert [new.name for old, new in pairs if old != new] == ['data']
    assert [new.address for _, new in pairs] == [old.address for old, _ in pairs]
    assert len(list(DataLoader(dataset, batch_size=3))) == 2


def test_stopped_stack_is_not_restarted(tmp_path: Path) -> None:
    """`revive_stack` returns None for a folder without a running stack."""
    assert revive_stack(tmp_path, report=_silent) is None


def test_failed_start_reports_the_error_and_records_no_stack(tmp_path: Path) -> None:
    """A start with a missing model fails with the service's error and records no stack."""
    started: list[str] = []

    def report(service: str, event: str) -> None:
        if event == 'starting':
            started.append(service)

    with pytest.raises(StackError, match='model'):
        start_stack(StackOptions(state_dir=tmp_path, base_model=str(tmp_path / 'missing')), report=report)
    assert 'model' in started
    assert StackState.load(tmp_path) is None


def _silent(service: str, event: str) -> None:
    del service, event
