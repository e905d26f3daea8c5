"""Tests of uploads of adapters over HTTP, repeated copies, and archives that are replaced during a download."""

import asyncio
import gzip
import io
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from fixtures.checkpoint_service import make_state
from fixtures.tinker_catalogue import BEST, RUN, TinkerCatalogue, tinker_catalogue
from twinkle.api.checkpoint.v1 import weights_pb2
from twinkle.checkpoint_engine import read_peft_folder, unpack_state, write_peft_folder
from twinkle_services.gateway.catalogue.paths import WeightsKind
from twinkle_services.gateway.http.validation import read_model
from twinkle_services.gateway.tinker.weights import SaveBody, save_of
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.rpc.context import acting_for
from twinkle_services.model.api.convert_verb import verb_from_proto
from twinkle_services.model.domain.operation import Save

STATE = make_state(3)
TENSORS = unpack_state(STATE.manifest, STATE.data)


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[TinkerCatalogue]:
    """The API, with a checkpoint of alice."""
    async with tinker_catalogue(tmp_path) as running:
        await running.save('best')
        yield running


@pytest.fixture
def archive(tmp_path: Path) -> bytes:
    """The archive of an adapter."""
    config = STATE.manifest.lora_config
    assert config is not None
    write_peft_folder(tmp_path / 'peft', TENSORS, config, base_model='org/tiny')
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode='w') as tar:
        for path in sorted((tmp_path / 'peft').iterdir()):
            tar.add(path, f'peft/{path.name}')
    return buffer.getvalue()


async def put(
    api: TinkerCatalogue, data: bytes, *, query: str = 'base_model=org/tiny', **fields: Any
) -> httpx.Response:
    """Send a body as the upload 'mine', and return the response."""
    return await api.call('PUT', f'uploads/mine?{query}', content=data, **fields)


async def files_of(api: TinkerCatalogue, tinker_path: str, folder: Path) -> Path:
    """Return a folder with the files of a checkpoint."""
    run_id, kind, name = tinker_path.removeprefix('tinker://').split('/')
    link = await api.call('GET', f'training_runs/{run_id}/checkpoints/{kind}/{name}/archive')
    data = (await api.http.get(link.headers['location'])).content
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        tar.extractall(folder, filter='data')
    return folder


@pytest.mark.parametrize('is_packed', [False, True])
async def test_an_archive_becomes_a_checkpoint(
    api: TinkerCatalogue, archive: bytes, tmp_path: Path, *, is_packed: bool
) -> None:
    """An uploaded archive, compressed or not, becomes a bitwise equal checkpoint. Repeats return this checkpoint."""
    data = gzip.compress(archive) if is_packed else archive
    created = await put(api, data)
    assert created.status_code == 201
    assert created.json()['checkpoint_type'] == 'training'
    assert read_peft_folder(await files_of(api, created.json()['tinker_path'], tmp_path / 'downloaded'))[0] == TENSORS
    assert (await put(api, data)).json() == created.json()
    info = await api.call('POST', 'weights_info', json={'tinker_path': created.json()['tinker_path']})
    assert (info.json()['base_model'], info.json()['lora_rank']) == ('org/tiny', 4)


async def test_weights_for_sampling_have_a_path_of_that_kind(api: TinkerCatalogue, archive: bytes) -> None:
    """Weights that are uploaded for sampling have a path of the kind `sampler_weights`."""
    created = await put(api, archive, query='base_model=org/tiny&kind=sampler_weights')
    assert created.json()['tinker_path'].endswith('/sampler_weights/mine')


async def test_upload_continues_part_by_part(api: TinkerCatalogue, archive: bytes) -> None:
    """Each response reports the received bytes; a part after a gap, or a status request, changes nothing."""
    size, received = len(archive), 0
    for end in (700, 701, 5000):
        headers = {'content-range': f'bytes {received}-{end - 1}/{size}'}
        response = await put(api, archive[received:end], headers=headers)
        assert (response.status_code, response.json()) == (202, {'held_bytes': end, 'size_bytes': size})
        received = end
    gap = await put(api, archive[6000:6010], headers={'content-range': f'bytes 6000-6009/{size}'})
    status = await put(api, b'', headers={'content-range': f'bytes */{size}'})
    assert gap.json() == status.json() == {'held_bytes': 5000, 'size_bytes': size}
    last = await put(api, archive[received:], headers={'content-range': f'bytes {received}-{size - 1}/{size}'})
    assert last.status_code == 201


async def test_interrupted_upload_keeps_its_bytes(api: TinkerCatalogue, archive: bytes, tmp_path: Path) -> None:
    """A client that disconnects within a part can resume the upload."""
    host, _, port = api.gateway.http_address.rpartition(':')
    _, writer = await asyncio.open_connection(host, int(port))
    head = (
        f'PUT /api/v1/uploads/mine?base_model=org/tiny HTTP/1.1\r\nhost: x\r\n'
        f'x-api-key: {api.keys["alice"]}\r\ncontent-length: {len(archive)}\r\n\r\n'
    )
    writer.write(head.encode() + archive[:3000])
    await writer.drain()
    uploads = tmp_path / 'checkpoints' / 'checkpoint-uploads'
    while not [path for path in uploads.glob('*/*/bytes') if path.stat().st_size == 3000]:
        await api.get('checkpoints')
    writer.close()
    status = await put(api, b'', headers={'content-range': f'bytes */{len(archive)}'})
    while status.status_code != 202:  # the first stream may still be open
        status = await put(api, b'', headers={'content-range': f'bytes */{len(archive)}'})
    assert status.json()['held_bytes'] == 3000
    rest = await put(api, archive[3000:], headers={'content-range': f'bytes 3000-{len(archive) - 1}/{len(archive)}'})
    assert rest.status_code == 201


@pytest.mark.parametrize(
    ('query', 'data', 'headers'),
    [
        ('', b'x', {}),
        ('base_model=org/tiny', b'no archive', {}),
        ('base_model=org/tiny', b'', {}),
        ('base_model=org/tiny&kind=other', b'x', {}),
        ('base_model=org/tiny&upload_id=a/b', b'x', {}),
        ('base_model=org/tiny', b'x', {'content-range': 'bytes 0-5/9'}),
        ('base_model=org/tiny', b'x', {'content-range': 'bytes 9-9/9'}),
        ('base_model=org/tiny', b'x', {'content-range': 'items 0-0/1'}),
        ('base_model=org/tiny', b'x', {'content-encoding': 'gzip'}),
    ],
)
async def test_malformed_upload_is_refused(
    api: TinkerCatalogue, query: str, data: bytes, headers: dict[str, str]
) -> None:
    """A malformed upload is refused with status 400 and a detail."""
    response = await put(api, data, query=query, headers=headers)
    assert response.status_code == 400, response.text
    assert response.json()['detail']


async def test_repeated_copy_is_the_same(api: TinkerCatalogue) -> None:
    """A tenant's copies with one idempotency key are one copy; each copy without a key is new."""
    request = {'source_path': f'tinker://{RUN}/weights/best', 'destination_project_id': 'p'}

    async def copy(**headers: str) -> str:
        response = await api.call('POST', 'copy_weights', json=request, headers=headers)
        assert response.status_code == 200, response.text
        return response.json()['tinker_path']

    keyed = {await copy(**{'x-idempotency-key': 'once'}) for _ in range(3)}
    assert len(keyed) == 1
    others = {await copy(**{'x-idempotency-key': 'twice'}), await copy(), await copy()}
    assert len(others | keyed) == 4


@pytest.mark.parametrize('location', ['headers', 'json'])
async def test_copy_with_an_access_token_is_refused(api: TinkerCatalogue, location: str) -> None:
    """A copy with an access token is refused with status 400, whether the token is in the header or in the body."""
    await api.save('best')
    body: dict[str, str] = {'source_path': f'tinker://{RUN}/weights/best'}
    fields: dict[str, dict[str, str]] = {'headers': {}, 'json': body}
    fields[location][{'headers': 'X-Tinker-Weights-Access-Token', 'json': 'weights_access_token'}[location]] = 'secret'
    response = await api.call('POST', 'copy_weights', **fields)
    assert (response.status_code, response.json()['reason']) == (400, 'INVALID_FIELD')
    assert 'secret' not in response.text


async def test_replaced_archive_has_another_tag(api: TinkerCatalogue) -> None:
    """A client that resumes the download of a replaced archive receives the complete new archive."""
    url = (await api.call('GET', f'{BEST}/archive')).headers['location']
    before = await api.http.get(url)
    await api.call('DELETE', BEST)
    await api.save('best', seed=8)
    headers = {'range': 'bytes=100-', 'if-range': before.headers['etag']}
    after = await api.http.get(url, headers=headers)
    assert after.status_code == 200
    assert after.headers['etag'] != before.headers['etag']
    assert after.content != before.content
    assert (await api.http.get(url, headers={**headers, 'if-range': after.headers['etag']})).status_code == 206


async def test_a_base_model_that_contradicts_the_weights_is_refused(api: TinkerCatalogue) -> None:
    """A sampling session may name its weights' base model or omit it, but may not name another base model."""
    created = await api.call('POST', 'create_session', json={'sdk_version': '0.38.0'})
    await api.save('best.sampler')
    path = f'tinker://{RUN}/sampler_weights/best'
    request = {'session_id': created.json()['session_id'], 'model_path': path}
    for index, (named, status) in enumerate([({}, 200), ({'base_model': 'org/tiny'}, 200), ({'base_model': 'x'}, 400)]):
        body = {**request, 'sampling_session_seq_id': index, **named}
        assert (await api.call('POST', 'create_sampling_session', json=body)).status_code == status


async def test_labels_of_a_save_are_stored_and_listed(api: TinkerCatalogue) -> None:
    """Labels of a save request are stored and listed."""
    body = {'model_id': RUN, 'seq_id': 1, 'path': 'noted', 'user_metadata': {'note': 'the good one'}}
    _, operation = save_of(read_model(SaveBody, body), WeightsKind.TRAINING)
    save = verb_from_proto(operation, 'operation', vocabulary_size=10)
    assert isinstance(save, Save)
    with acting_for(Caller(tenant_id='alice', is_internal=True)):
        target = weights_pb2.CheckpointTarget(name=save.name, user_metadata=save.user_metadata)
        await api.checkpoints.weights.save_checkpoint(RUN, STATE, target)
    listed = await api.get(f'training_runs/{RUN}/checkpoints')
    found = {item['tinker_path']: item['user_metadata'] for item in listed['checkpoints']}
    assert found[f'tinker://{RUN}/weights/noted'] == {'note': 'the good one'}
    everything = await api.until_listed(2)
    assert {'note': 'the good one'} in [item['user_metadata'] for item in everything]
