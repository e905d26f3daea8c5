"""The five services with `twinkle up --tls`: use by both SDKs, refusal of other callers, and restarts."""

import gc
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
import yaml
from typer.testing import CliRunner

from fixtures.certificates import INTERNAL, tls_of
from fixtures.tinker_sdk import SDK_MARKS, new_model, service_client, train
from fixtures.tiny_model import build_tiny_model
from twinkle.api.server.v1 import server_service_pb2
from twinkle.api.server.v1.server_service_pb2_grpc import ServerServiceStub
from twinkle.data_format import LoraConfig
from twinkle_client import TwinkleClient
from twinkle_client.cli import app
from twinkle_client.dataloader import DataLoader
from twinkle_client.dataset import Dataset, DatasetMeta
from twinkle_client.model import MultiLoraTransformersModel
from twinkle_client.sampler import Sampler
from twinkle_client.stack import SERVICES, StackOptions, StackState, revive_stack, service_of, start_stack, stop_stack
from twinkle_client.stack.process_ids import end_process
from twinkle_services.kit.rpc.channel import identity_metadata, open_forwarding_channel
from twinkle_services.kit.tls import TlsConfig

pytestmark = [pytest.mark.timeout(300), *SDK_MARKS]


@pytest.fixture(scope='module', autouse=True)
def _collect_sdk_connections() -> Iterator[None]:
    """Free the SDK's open connections at the end of this module, whose marks ignore the resulting warnings."""
    yield
    gc.collect()


@pytest.fixture(scope='module')
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StackState]:
    """Running stack with TLS."""
    model = build_tiny_model(tmp_path_factory.mktemp('model'), family='qwen3')
    folder = tmp_path_factory.mktemp('secure')
    options = StackOptions(state_dir=folder, base_model=str(model), engine='torch', tls=True)
    yield start_stack(options, report=_silent)
    stop_stack(folder, report=_silent)


def test_trained_adapter_can_be_sampled(stack: StackState) -> None:
    """Training, publishing and sampling work over TLS and use every connection between services."""
    with TwinkleClient(stack.url, stack.read_api_key(), ca=stack.ca) as client:
        assert client.health_check()
        model = MultiLoraTransformersModel(stack.base_model, client=client)
        model.add_adapter_to_model('default', LoraConfig(r=4, seed=7))
        chat = {'messages': [{'role': 'user', 'content': 'a'}, {'role': 'assistant', 'content': 'b'}]}
        dataset = Dataset(DatasetMeta(data=[chat]), client=client)
        dataset.set_template('Template', model_id=stack.base_model)
        dataset.encode()
        losses = []
        for handle in DataLoader(dataset, epochs=4).handles():
            losses.append(model.forward_backward(handle)['loss'])
            model.clip_grad_and_step(1.0)
        assert losses[-1] < losses[0]
        version = model.publish_version()
        sampler = Sampler(stack.base_model, client=client)
        options = {'max_tokens': 3, 'temperature': 0}
        sequence = sampler.sample({'input_ids': [5, 6, 7]}, options, 'default', version=version).sequences[0]
        assert [span.version for span in sequence.version_spans] == [version]


def test_command_line_connects_with_the_state_folder(stack: StackState) -> None:
    """The command line only needs the state folder, which has the address, the key and the authority."""
    result = CliRunner().invoke(app, ['status', '--state-dir', str(stack.state_dir)])
    assert result.exit_code == 0
    assert result.output.count('serving') == len(SERVICES)


def test_tinker_sdk_trains_over_https(stack: StackState, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Tinker SDK trusts the private certificate authority in the file that SSL_CERT_FILE names."""
    monkeypatch.setenv('SSL_CERT_FILE', stack.ca)
    with service_client(stack) as service:
        losses = train(new_model(service, stack), [5, 6, 7, 8], steps=3)
    assert losses[-1] < losses[0]


async def test_token_without_certificate_is_refused(stack: StackState) -> None:
    """Every service behind the gateway refuses the deployment's token without the gateway's certificate."""
    addresses = {service_of(item.name): item.address for item in stack.services}
    token = yaml.safe_load((stack.state_dir / 'config' / 'gateway.yaml').read_text())['internal_token']
    folder = Path(stack.ca).parent
    callers = {
        grpc.StatusCode.UNAVAILABLE: (TlsConfig(), TlsConfig(ca=folder / 'ca.crt', trusted_peers=())),
        grpc.StatusCode.PERMISSION_DENIED: (tls_of(folder, 'data'),),
        grpc.StatusCode.OK: (tls_of(folder, 'gateway'),),
    }
    for service in INTERNAL:
        for code, kinds in callers.items():
            assert {await _code(addresses[service], tls, token) for tls in kinds} == {code}, service


@pytest.mark.slow
def test_killed_gateway_is_restarted_at_its_addresses(stack: StackState) -> None:
    """A killed gateway is restarted at its addresses, and clients and samplers reconnect."""
    gateway = next(item for item in stack.services if item.name == 'gateway')
    os.kill(gateway.pid, signal.SIGKILL)
    assert end_process(gateway.pid, gateway.start_mark, grace_seconds=10)
    revived = revive_stack(stack.state_dir, report=_silent)
    assert revived is not None
    assert replace(revived, services=()) == replace(stack, services=())
    with TwinkleClient(revived.url, revived.read_api_key(), ca=revived.ca) as client:
        sampled = Sampler(stack.base_model, client=client).sample({'input_ids': [5, 6, 7]}, {'max_tokens': 1})
        assert len(sampled.sequences[0].tokens) == 1


async def _code(address: str, tls: TlsConfig, token: str) -> grpc.StatusCode:
    async with open_forwarding_channel(address, tls=tls) as channel:
        call = ServerServiceStub(channel).GetServerInfo(
            server_service_pb2.GetServerInfoRequest(), metadata=identity_metadata(token), timeout=10
        )
        return await call.code()


def _silent(*_: object) -> None:
    pass
