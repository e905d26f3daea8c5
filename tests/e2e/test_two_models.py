"""Two base models in one stack, started by `twinkle up --model A --model B`; clients train and sample both."""

import gc
import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import tinker
from typer.testing import CliRunner

from fixtures.tinker_sdk import SDK_MARKS, service_client, tokens_of, train, weighted
from fixtures.tiny_model import build_tiny_model
from twinkle.data_format import LoraConfig
from twinkle_client import RetryableError, TwinkleClient, UsageError
from twinkle_client.cli import app
from twinkle_client.model import MultiLoraTransformersModel
from twinkle_client.sampler import Sampler
from twinkle_client.stack import StackOptions, StackState, revive_stack, start_stack, stop_stack
from twinkle_client.stack.process_ids import end_process

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), *SDK_MARKS]
EXAMPLES = [tokens_of(seed) for seed in range(3)]


@pytest.fixture(scope='module', autouse=True)
def _collect_sdk_connections() -> Iterator[None]:
    """Free the SDK's open connections at the end of this module, whose marks ignore the resulting warnings."""
    yield
    gc.collect()


@pytest.fixture(scope='module')
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StackState]:
    """Running stack with two base models of different families."""
    root, folder = tmp_path_factory.mktemp('bases'), tmp_path_factory.mktemp('stack')
    names = [
        str(build_tiny_model(root / 'tiny-llama')),
        str(build_tiny_model(root / 'tiny-qwen3', family='qwen3')),
    ]
    options = StackOptions(state_dir=folder, base_model=names[0], more_models=(names[1],), engine='torch')
    yield start_stack(options, report=_silent)
    stop_stack(folder, report=_silent)


@pytest.fixture(scope='module')
def service(stack: StackState) -> Iterator[tinker.ServiceClient]:
    """Client with a session of the Tinker SDK."""
    with service_client(stack) as client:
        yield client


def test_all_interfaces_list_both_models(stack: StackState) -> None:
    """Both models appear in `twinkle status`, GetServerInfo, and the lists of the Tinker and OpenAI APIs."""
    result = _status(stack)
    while result.exit_code != 0:
        # A service that another test killed may still have to register again.
        result = _status(stack)
    assert result.output.count('serving') == len(stack.services) == 7
    names = set(stack.base_models)
    with TwinkleClient(stack.address, stack.read_api_key()) as client:
        infos = client.get_server_info().services
    trainable = [{model.base_model for model in info.base_models} for info in infos if info.service == 'model']
    assert sorted(trainable, key=sorted) == sorted([{name} for name in names], key=sorted)
    assert {model.base_model for info in infos if info.service == 'sampler' for model in info.base_models} == names
    # The HTTP APIs do not show folders of the server.
    shown = {Path(name).name for name in names}
    capabilities = _fetch(stack, '/api/v1/get_server_capabilities')
    assert {model['model_name'] for model in capabilities['supported_models']} == shown
    assert shown <= {model['id'] for model in _fetch(stack, '/v1/models')['data']}


def test_native_client_trains_and_samples_both_models(stack: StackState) -> None:
    """Samples come from the trained adapter of the requested base model, which refuses the other model's checkpoint."""
    batch = [{'input_ids': tokens, 'labels': tokens} for tokens in EXAMPLES]
    with TwinkleClient(stack.address, stack.read_api_key()) as client:
        models = [MultiLoraTransformersModel(name, client=client) for name in stack.base_models]
        for model, adapter in zip(models, ('first', 'second'), strict=True):
            model.add_adapter_to_model(adapter, LoraConfig(r=4, seed=7))
            model.set_optimizer('AdamW', lr=2e-2)
        losses: list[list[float]] = [[], []]
        for _ in range(4):
            for model, own_losses in zip(models, losses, strict=True):
                own_losses.append(model.forward_backward(batch)['loss'])
                model.clip_grad_and_step()
        assert all(own_losses[-1] < own_losses[0] for own_losses in losses)
        for model, name, adapter in zip(models, stack.base_models, ('first', 'second'), strict=True):
            version = model.publish_version()
            sampler, greedy = Sampler(name, client=client), {'max_tokens': 3, 'temperature': 0}
            sequence = sampler.sample('a', greedy, adapter, version=version).sequences[0]
            assert sequence.new_input_feature is not None
            trained = model.forward_only([sequence.new_input_feature])['logps'][0]
            sampled = [candidates[0][1] for candidates in sequence.logprobs]
            assert trained[trained != 0].tolist() == pytest.approx(sampled, abs=1e-4)
        path = models[0].save('saved')
        other = MultiLoraTransformersModel(stack.base_models[1], client=client)
        other.add_adapter_to_model('other', LoraConfig(r=4))
        with pytest.raises(UsageError, match=Path(stack.base_models[0]).name):
            other.load(path)


def test_tinker_client_trains_and_samples_both_models(stack: StackState, service: tinker.ServiceClient) -> None:
    """One Tinker session trains and samples adapters of both base models."""
    models = [
        service.create_lora_training_client(base_model=name, rank=8, seed=7).result() for name in stack.base_models
    ]
    losses: list[list[float]] = [[], []]
    for _ in range(3):
        for model, own_losses in zip(models, losses, strict=True):
            own_losses.extend(train(model, *EXAMPLES))
    assert all(own_losses[-1] < own_losses[0] for own_losses in losses)
    assert losses[0][0] != losses[1][0]
    prompt = tinker.ModelInput.from_ints(EXAMPLES[0])
    for model in models:
        sampler = model.save_weights_and_get_sampling_client().result()
        answer = sampler.sample(prompt, 1, tinker.SamplingParams(max_tokens=3, temperature=0)).result()
        assert len(answer.sequences[0].tokens) == 3


def test_killed_model_service_affects_only_its_model(stack: StackState, service: tinker.ServiceClient) -> None:
    """A killed model service makes its futures wait and its native calls fail; the other service continues."""
    running, interrupted = (
        service.create_lora_training_client(base_model=name, rank=4).result() for name in stack.base_models
    )
    train(interrupted, *EXAMPLES)
    with TwinkleClient(stack.address, stack.read_api_key()) as client:
        native = MultiLoraTransformersModel(stack.base_models[1], client=client)
        adapter_id = native.add_adapter_to_model('default', LoraConfig(r=4))
        killed = next(item for item in stack.services if item.name == 'model-2')
        os.kill(killed.pid, signal.SIGKILL)
        end_process(killed.pid, killed.start_mark, grace_seconds=10)
        pending = interrupted.forward_backward([weighted(EXAMPLES[0])], 'cross_entropy')
        assert len(train(running, *EXAMPLES, steps=2)) == 2
        assert not pending.future().done()
        assert client.get_training_run(adapter_id).base_model == stack.base_models[1]
    with (
        TwinkleClient(stack.address, stack.read_api_key(), retry_timeout=timedelta()) as no_retry_client,
        pytest.raises(RetryableError),
    ):
        MultiLoraTransformersModel(stack.base_models[1], client=no_retry_client).add_adapter_to_model(
            'other', LoraConfig(r=4)
        )
    assert revive_stack(stack.state_dir, report=_silent) is not None
    assert pending.result().metrics['loss:sum'] > 0
    assert len(train(interrupted, *EXAMPLES)) == 1


def _status(stack: StackState) -> Any:
    return CliRunner().invoke(app, ['status', '--state-dir', str(stack.state_dir)], env={'COLUMNS': '400'})


def _fetch(stack: StackState, path: str) -> Any:
    headers = {'authorization': f'Bearer {stack.read_api_key()}', 'x-api-key': stack.read_api_key()}
    request = urllib.request.Request(f'http://{stack.http_address}{path}', headers=headers)
    with urllib.request.urlopen(request) as response:
        return json.loads(response.read())


def _silent(service: str, event: str) -> None:
    del service, event
