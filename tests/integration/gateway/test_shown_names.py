"""If the base model is served from a folder, responses do not contain the server's folders."""

import io
import re
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from fixtures.checkpoint_service import make_state
from fixtures.every_call import body_of, routes_of, url_of
from fixtures.running_gateway import bearer
from fixtures.two_tenants import ABSENT, TwoTenants, two_tenants
from twinkle.api.checkpoint.v1 import checkpoint_service_pb2, checkpoint_service_pb2_grpc
from twinkle.checkpoint_engine import unpack_state, write_peft_folder

FOLDER = '/srv/secret models'
BASE_MODEL = f'{FOLDER}/tiny'
FUTURE = re.compile(r'fu-[0-9a-f]{40}')
SHOWN = {
    'GET /api/v1/get_server_capabilities',
    'GET /api/v1/samplers/{sampling_session_id}',
    'GET /api/v1/training_runs',
    'GET /api/v1/training_runs/{run_id}',
    'GET /oai/api/v1/models',
    'GET /oai/api/v1/models/{model:path}',
    'GET /v1/models',
    'GET /v1/models/{model:path}',
    'POST /api/v1/get_info',
    'POST /api/v1/weights_info',
    'POST /oai/api/v1/chat/completions',
    'POST /oai/api/v1/completions',
    'POST /oai/api/v1/responses',
    'POST /v1/chat/completions',
    'POST /v1/completions',
    'POST /v1/messages',
    'POST /v1/responses',
}
"""Routes whose responses name the base model."""
DOWNLOAD = 'GET /console/api/checkpoints/{run_id}/{name}'
"""Route whose body is the stored files. They have the base model's full name, as in the gRPC API."""


@pytest.fixture
async def deployment(tmp_path: Path, tiny_llama_dir: Path) -> AsyncIterator[TwoTenants]:
    """A gateway with two tenants, whose base model is served from a folder."""
    async with two_tenants(tmp_path, tiny_llama_dir, base_model=BASE_MODEL) as running:
        yield running


async def outcome_of(deployment: TwoTenants, response: httpx.Response) -> str:
    """Return the outcome of the future that a response names; return an empty text without a future."""
    future_id = FUTURE.search(response.text)
    if future_id is None:
        return ''
    body = {'request_id': future_id[0]}
    return (await deployment.call('POST', '/api/v1/retrieve_future', deployment.secrets['alice'], body)).text


async def test_no_response_contains_a_folder(deployment: TwoTenants, tmp_path: Path) -> None:
    """No route, future or error contains a server path; routes that name the base model show its folder's name."""
    named: set[str] = set()
    # Deletions come last, because other routes need the deleted items.
    for method, path in sorted(routes_of(deployment), key=lambda route: route[0] == 'DELETE'):
        for ids in (deployment.alices, ABSENT):
            body = body_of(path, ids)
            response = await deployment.call(method, url_of(path, ids), deployment.secrets['alice'], body)
            assert response.status_code < 500, (method, path, response.text)
            content = '' if f'{method} {path}' == DOWNLOAD and response.is_success else response.text
            text = content + str(response.headers) + await outcome_of(deployment, response)
            assert FOLDER not in text, (method, path, text)
            assert str(tmp_path) not in text, (method, path, text)
            if '"tiny"' in text:
                named.add(f'{method} {path}')
    assert named >= SHOWN, SHOWN - named


async def test_shown_names_are_accepted(deployment: TwoTenants) -> None:
    """A client can train and sample with the shown name, and errors list only shown names."""
    alice = deployment.secrets['alice']
    for path in ('create_model', 'create_sampling_session'):
        body = {**body_of(f'/api/v1/{path}', deployment.alices), 'model_path': None}
        assert (await deployment.call('POST', f'/api/v1/{path}', alice, body)).status_code == 200
        refused = await deployment.call('POST', f'/api/v1/{path}', alice, {**body, 'base_model': 'other'})
        assert refused.status_code == 400
        assert refused.json()['detail'].endswith("'other' is not available; choose one of tiny")
    body = {'model': 'tiny', 'prompt': 'x', 'max_tokens': 1}
    assert (await deployment.call('POST', '/v1/completions', alice, body)).status_code == 200
    refused = await deployment.call('POST', '/v1/completions', alice, {**body, 'model': 'other'})
    assert refused.status_code == 404
    assert refused.json()['error']['metadata']['known'] == 'tiny'


async def test_upload_names_the_base_model_as_shown(deployment: TwoTenants, tmp_path: Path) -> None:
    """An upload may use the shown name of its base model; the checkpoint belongs to the served base model."""
    state = make_state(7)
    assert state.manifest.lora_config is not None
    tensors = unpack_state(state.manifest, state.data)
    write_peft_folder(tmp_path / 'peft', tensors, state.manifest.lora_config, base_model='elsewhere')
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode='w') as tar:
        tar.add(tmp_path / 'peft', 'peft')
    headers = {'x-api-key': deployment.secrets['alice']}
    url = '/api/v1/uploads/mine?base_model=tiny'
    created = await deployment.http.put(url, content=buffer.getvalue(), headers=headers)
    assert created.status_code == 201, created.text
    path = created.json()['tinker_path'].replace('tinker://', 'twinkle://')
    stub = checkpoint_service_pb2_grpc.CheckpointServiceStub(deployment.gateway.channel)
    request = checkpoint_service_pb2.GetCheckpointRequest(checkpoint_path=path)
    found = await stub.GetCheckpoint(request, metadata=bearer(deployment.secrets['alice']))
    assert found.checkpoint.base_model == BASE_MODEL


async def test_unavailable_base_model_is_shown_by_its_name(deployment: TwoTenants) -> None:
    """An error about weights of another base model contains the name of that model's folder, but not its path."""
    body = {'model': f'other;tinker://{deployment.alices.model}/sampler_weights/best', 'prompt': 'x'}
    response = await deployment.call('POST', '/v1/completions', deployment.secrets['alice'], body)
    assert response.status_code == 400
    assert response.json()['error']['message'].endswith("but the base model of the weights is 'tiny'")
