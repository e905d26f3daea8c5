"""The deployment of deploy/compose.yaml trains and samples, and its user sees no error when a gateway is killed.

The processes have the commands, variables and files of compose.yaml. Programs of Debian replace the images of other
projects.
"""

import json
import os
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import quote
from urllib.request import urlopen

import fsspec
import pytest
from openai import OpenAI

from fixtures.compose_run import API_KEY, BASE_MODEL, ComposeRun, compose_run, missing_programs
from twinkle.data_format import LoraConfig
from twinkle_client import TwinkleClient
from twinkle_client.dataloader import DataLoader
from twinkle_client.dataset import Dataset, DatasetMeta
from twinkle_client.model import MultiLoraTransformersModel
from twinkle_client.sampler import Sampler

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
GATEWAYS = ('gateway-1', 'gateway-2')
SENDERS = {'twinkle-gateway', 'twinkle-model', 'twinkle-sampler', 'twinkle-data', 'twinkle-checkpoint'}
"""Names of the services in spans."""
CHATS = [
    {'messages': [{'role': 'user', 'content': f'say {word}'}, {'role': 'assistant', 'content': word}]}
    for word in ('one', 'two', 'three', 'four', 'five', 'six')
]
PROMPT = {'messages': CHATS[0]['messages'][:1]}


@pytest.fixture(scope='module')
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComposeRun]:
    """Running deployment; without its programs, tests fail in CI and are skipped elsewhere."""
    missing = missing_programs()
    if missing or os.geteuid() != 0:
        fail_or_skip = pytest.fail if os.environ.get('CI') else pytest.skip
        fail_or_skip(f'run as root, and install the packages: {" ".join(missing)}')
    with compose_run(tmp_path_factory.mktemp('compose')) as found:
        yield found


def test_a_killed_gateway_causes_no_error(run: ComposeRun) -> None:
    """A program trains and samples through the proxy, and continues bitwise after its gateway was killed."""
    with TwinkleClient(f'grpc://{run.address("proxy", 8000)}', API_KEY) as client:
        dataset = Dataset(DatasetMeta(data=CHATS), client=client)
        dataset.set_template('Template', model_id=BASE_MODEL, max_length=128)
        dataset.encode()
        loader = DataLoader(dataset, batch_size=3, shuffle=True, seed=0, epochs=4)
        model = MultiLoraTransformersModel(BASE_MODEL, client=client)
        losses = _train(model, 'whole', loader)
        assert _sampled_version(client, model, 'whole') == 1
        survivor = _train_interrupted(run, client, model, loader, losses)
        assert run.training_calls(survivor) > 0
        assert _sampled_version(client, model, 'interrupted') == 1
        path = model.save('last', adapter_name='interrupted')
        assert client.get_checkpoint(path).path == path
    _check_http(run)
    _check_stores(run)
    _check_observability(run, survivor)


def _train_interrupted(
    run: ComposeRun, client: TwinkleClient, model: MultiLoraTransformersModel, loader: DataLoader, losses: list[float]
) -> str:
    """Train an equal adapter while its gateway is killed; return the name of the other gateway."""
    first, second = sorted(GATEWAYS, key=run.training_calls)
    model.add_adapter_to_model('interrupted', LoraConfig(r=4, seed=7))
    model.set_optimizer('AdamW', lr=2e-2, adapter_name='interrupted')
    found: list[float] = []
    for step, batch in enumerate(loader):
        future = model.forward_backward.submit(batch, adapter_name='interrupted')
        if step == 3:
            run.host.kill(second)
        found.append(future.result()['loss'])
        model.clip_grad_and_step(1.0, adapter_name='interrupted')
    assert found == losses
    assert model.calculate_metric(adapter_name='interrupted')['step_count'] == len(losses)
    assert client.health_check()
    return first


def _train(model: MultiLoraTransformersModel, name: str, loader: DataLoader) -> list[float]:
    model.add_adapter_to_model(name, LoraConfig(r=4, seed=7))
    model.set_optimizer('AdamW', lr=2e-2, adapter_name=name)
    losses: list[float] = []
    for batch in loader:
        losses.append(model.forward_backward(batch, adapter_name=name)['loss'])
        model.clip_grad_and_step(1.0, adapter_name=name)
    return losses


def _sampled_version(client: TwinkleClient, model: MultiLoraTransformersModel, name: str) -> int:
    """Publish a version of an adapter, and return the version that a sample names."""
    version = model.publish_version(adapter_name=name)
    sampler = Sampler(BASE_MODEL, client=client)
    sequence = sampler.sample(PROMPT, {'max_tokens': 4, 'temperature': 0}, name, version=version).sequences[0]
    (span,) = sequence.version_spans
    return span.version


def _check_http(run: ComposeRun) -> None:
    """Sample with OpenAI's API through the proxy."""
    openai = OpenAI(base_url=f'http://{run.address("proxy", 8080)}/v1', api_key=API_KEY)
    messages: Any = PROMPT['messages']
    response = openai.chat.completions.create(model=BASE_MODEL, messages=messages, max_tokens=4)
    assert response.usage is not None
    assert response.usage.completion_tokens > 0


def _check_stores(run: ComposeRun) -> None:
    """Check that states are in the bucket, and that weights were handed over in memory."""
    variables = run.containers['checkpoint'].environment
    options = {'key': variables['AWS_ACCESS_KEY_ID'], 'secret': variables['AWS_SECRET_ACCESS_KEY']}
    files: Any = fsspec.filesystem('s3', endpoint_url=f'http://{run.address("objects", 7070)}', **options)
    assert any(path.endswith('adapter_model.safetensors') for path in files.find('twinkle/states'))
    assert list(run.host.volume('weights').iterdir())


def _unreachable(values: dict[str, str]) -> set[str]:
    return {target for target, value in values.items() if value != '1'}


def _check_observability(run: ComposeRun, survivor: str) -> None:
    """Check the metrics that Prometheus has, and the spans of each service."""
    lost = next(name for name in GATEWAYS if name != survivor)
    # Prometheus has no value of a target before it has read it once.
    while len(values := _instant(run, 'up{job=~"twinkle-.*"}')) < 7 or _unreachable(values) != {f'{lost}:9100'}:
        assert run.host.wait_for('prometheus', '/-/ready', port=9090)
    # Both samplers are ready; the last scrape may have found one that had not answered yet.
    while _instant(run, 'twinkle_fleet_members{state="ready"}').get(f'{survivor}:9100') != '2':
        assert run.host.wait_for('prometheus', '/-/ready', port=9090)
    spans = run.host.volume('traces') / 'traces.json'
    assert set(spans.read_text().split()) >= SENDERS


def _instant(run: ComposeRun, expression: str) -> dict[str, str]:
    """Return the current values of an expression by instance."""
    with urlopen(f'http://{run.address("prometheus", 9090)}/api/v1/query?query={quote(expression)}') as response:
        found: Sequence[Any] = json.load(response)['data']['result']
    return {item['metric']['instance']: item['value'][1] for item in found}
