"""Tests of runs, checkpoints and links to their files in the Tinker API, with a real checkpoint service."""

import asyncio
import io
import tarfile
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from fixtures.checkpoint_service import make_state
from fixtures.tinker_catalogue import BEST, RUN, RUN_PATH, TinkerCatalogue, tinker_catalogue
from twinkle.api.checkpoint.v1 import weights_pb2
from twinkle_services.checkpoint.application.checkpoints import Checkpoints
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.rpc.context import acting_for

HOUR = 3600


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[TinkerCatalogue]:
    """The API, with a checkpoint of each kind in alice's run."""
    async with tinker_catalogue(tmp_path) as running:
        for index, name in enumerate(('best', 'best.sampler', 'out.external')):
            await running.save(name, seed=index)
            running.clock.advance(timedelta(seconds=1))
        yield running


def _files_in(archive: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        readers = {name: opened.extractfile(name) for name in opened.getnames()}
        return {name: reader.read() for name, reader in readers.items() if reader is not None}


async def test_runs_are_listed_and_shown_with_their_newest_checkpoints(api: TinkerCatalogue) -> None:
    """A run is listed with its labels, rank and newest weights for training and for sampling."""
    await api.until_listed(3)
    listed = await api.get('training_runs?limit=5&offset=0&access_scope=owned')
    assert listed['cursor'] == {'offset': 0, 'limit': 5, 'total_count': 1}
    (run,) = listed['training_runs']
    assert run == await api.get(f'{RUN_PATH}?access_scope=accessible')
    assert run['training_run_id'] == RUN
    assert run['lora_rank'] == 4
    assert run['user_metadata'] == {'renderer_name': 'plain'}
    assert run['last_checkpoint']['tinker_path'] == f'tinker://{RUN}/weights/best'
    assert run['last_sampler_checkpoint']['tinker_path'] == f'tinker://{RUN}/sampler_weights/best'
    assert (await api.get('training_runs?offset=1'))['training_runs'] == []


async def test_checkpoints_are_listed_by_kind_with_paging(api: TinkerCatalogue) -> None:
    """Checkpoints of each kind are listed with the kind in their names, newest first and in pages."""
    listed = await api.until_listed(3)
    assert [item['checkpoint_id'] for item in listed] == [
        'external_weights/out',
        'sampler_weights/best',
        'weights/best',
    ]
    assert [item['checkpoint_type'] for item in listed] == ['external', 'sampler', 'training']
    second = await api.get('checkpoints?limit=1&offset=1')
    assert second == {'checkpoints': [listed[1]], 'cursor': {'offset': 1, 'limit': 1, 'total_count': 3}}
    assert (await api.get(f'{RUN_PATH}/checkpoints'))['checkpoints'] == listed


async def test_deleted_checkpoint_disappears_immediately(api: TinkerCatalogue) -> None:
    """A deleted checkpoint is immediately absent from all lists. An equally named one of another kind is kept."""
    await api.until_listed(3)
    assert (await api.call('DELETE', BEST)).status_code == 200
    remaining = ['external_weights/out', 'sampler_weights/best']
    assert [item['checkpoint_id'] for item in (await api.get('checkpoints'))['checkpoints']] == remaining
    assert [item['checkpoint_id'] for item in (await api.get(f'{RUN_PATH}/checkpoints'))['checkpoints']] == remaining
    assert (await api.call('DELETE', BEST)).status_code == 404


async def test_expired_checkpoint_is_deleted(api: TinkerCatalogue) -> None:
    """A time to live is listed and can be removed; the files are deleted once it has passed."""
    await api.until_listed(3)
    assert (await api.call('PUT', f'{BEST}/ttl', json={'ttl_seconds': HOUR})).status_code == 200
    assert (await api.get('checkpoints'))['checkpoints'][2]['expires_at']
    assert (await api.call('PUT', f'{BEST}/ttl', json={'ttl_seconds': None})).status_code == 200
    assert (await api.get('checkpoints'))['checkpoints'][2]['expires_at'] is None
    assert (await api.call('PUT', f'{BEST}/ttl', json={'ttl_seconds': 5})).status_code == 200
    api.clock.advance(timedelta(seconds=6))
    assert len((await api.get(f'{RUN_PATH}/checkpoints'))['checkpoints']) == 2
    assert (await api.call('GET', f'{BEST}/archive')).status_code == 404
    assert await Checkpoints(api.checkpoints.registry).delete_expired() == 1
    await api.until_listed(2)
    assert not [folder for folder in api.checkpoints.stored_folders() if '/weights/best/' in folder]


@pytest.mark.parametrize(
    'body', [{'ttl_seconds': 0}, {'ttl_seconds': -1}, {'ttl_seconds': '5'}, {'ttl_seconds': 1e9}, []]
)
async def test_invalid_time_to_live_changes_nothing(api: TinkerCatalogue, body: object) -> None:
    """A time to live that is not a whole number of seconds from 1 up to ten years is refused and changes nothing."""
    assert (await api.call('PUT', f'{BEST}/ttl', json=body)).status_code == 400
    assert all(item['expires_at'] is None for item in (await api.get(f'{RUN_PATH}/checkpoints'))['checkpoints'])


async def test_published_checkpoint_is_readable_but_not_listed_by_others(api: TinkerCatalogue) -> None:
    """Another tenant can download and copy a public checkpoint, but not change or list it."""
    assert (await api.call('GET', f'{BEST}/archive', key='bob')).status_code == 404
    assert (await api.call('POST', f'{BEST}/publish')).status_code == 200
    assert [item['public'] for item in (await api.get('checkpoints'))['checkpoints'] if item['public']] == [True]
    assert (await api.call('GET', f'{BEST}/archive', key='bob')).status_code == 302
    assert (await api.get('checkpoints', key='bob'))['checkpoints'] == []
    for method, path in (('DELETE', BEST), ('DELETE', f'{BEST}/publish'), ('PUT', f'{BEST}/ttl')):
        assert (await api.call(method, path, key='bob')).status_code == 404
    request = {'source_path': f'tinker://{RUN}/weights/best', 'destination_project_id': 'pr-1'}
    copied = await api.call('POST', 'copy_weights', key='bob', json=request)
    assert copied.status_code == 200
    (copy,) = await api.until_listed(1, key='bob')
    assert copy['tinker_path'] == copied.json()['tinker_path']
    assert not copy['public']
    assert (await api.call('DELETE', f'{BEST}/publish')).status_code == 200
    assert (await api.call('GET', f'{BEST}/archive', key='bob')).status_code == 404
    assert (await api.call('POST', 'copy_weights', key='bob', json=request)).status_code == 404


async def test_copy_belongs_to_a_model_of_the_session(api: TinkerCatalogue) -> None:
    """A copy for a session's model has the id of this model; another tenant's session is not found."""
    session_id = (await api.call('POST', 'create_session', json={})).json()['session_id']
    request = {'source_path': f'tinker://{RUN}/weights/best', 'session_id': session_id, 'model_seq_id': 3}
    response = await api.call('POST', 'copy_weights', json={**request, 'ttl_seconds': HOUR})
    assert response.json() == {'tinker_path': f'tinker://{session_id}:train:3/weights/best'}
    (copy,) = (await api.get(f'training_runs/{session_id}:train:3/checkpoints'))['checkpoints']
    assert copy['expires_at']
    await api.call('POST', f'{BEST}/publish')
    assert (await api.call('POST', 'copy_weights', key='bob', json=request)).status_code == 404


async def test_archive_is_a_peft_folder_and_supports_ranges(api: TinkerCatalogue) -> None:
    """A link needs no key and serves a tar archive, or the requested range of it."""
    link = await api.call('GET', f'{BEST}/archive')
    assert link.status_code == 302
    url = link.headers['location']
    assert url == link.json()['url']
    whole = await api.http.get(url)
    names = _files_in(whole.content)
    assert 'adapter_model.safetensors' in names
    assert 'adapter_config.json' in names
    part = await api.http.get(url, headers={'range': 'bytes=700-'})
    assert part.status_code == 206
    assert part.content == whole.content[700:]
    assert part.headers['content-range'] == f'bytes 700-{len(whole.content) - 1}/{len(whole.content)}'
    requested_range = await api.http.get(url, headers={'range': 'bytes=5-9', 'if-range': whole.headers['etag']})
    assert requested_range.content == whole.content[5:10]
    other = await api.http.get(url, headers={'range': 'bytes=5-9', 'if-range': '"another"'})
    assert other.content == whole.content
    assert (await api.http.get(url, headers={'range': f'bytes={len(whole.content)}-'})).status_code == 416


async def test_interrupted_downloads_leave_no_traceback(
    api: TinkerCatalogue, capfd: pytest.CaptureFixture[str]
) -> None:
    """Clients that close or reset the connection in the middle of an archive cause no traceback in the log."""
    state = make_state(3, size_bytes=24 << 20)
    with acting_for(Caller(tenant_id='alice', is_internal=True)):
        await api.checkpoints.weights.save_checkpoint(RUN, state, weights_pb2.CheckpointTarget(name='large'))
    await api.until_listed(4)
    path = (await api.call('GET', f'{RUN_PATH}/checkpoints/weights/large/archive')).headers['location']
    host, port = api.gateway.http_address.rsplit(':', 1)
    request = f'GET {urlsplit(path).path} HTTP/1.1\r\nhost: {host}\r\n\r\n'.encode()
    for read_bytes in (0, 1000, 4 << 20):
        for is_reset in (True, False):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(request)
            await writer.drain()
            if read_bytes:
                await reader.readexactly(read_bytes)
            writer.transport.abort() if is_reset else writer.close()
    whole = await api.http.get(path)
    assert len(whole.content) > 24 << 20
    logged = ''.join(capfd.readouterr())
    assert 'Traceback' not in logged
    assert 'Exception' not in logged


async def test_external_weights_have_a_link_for_each_file(api: TinkerCatalogue) -> None:
    """External weights have a link for each file of their archive; other kinds have no such links."""
    found = await api.get(f'{RUN_PATH}/checkpoints/external_weights/out/external_weights_urls')
    archive = await api.call('GET', f'{RUN_PATH}/checkpoints/external_weights/out/archive')
    whole = _files_in((await api.http.get(archive.headers['location'])).content)
    assert {name: (await api.http.get(url)).content for name, url in found['urls'].items()} == whole
    assert (await api.call('GET', f'{BEST}/external_weights_urls')).status_code == 400


async def test_link_expires_and_cannot_be_changed(api: TinkerCatalogue) -> None:
    """A link is refused after one hour, and if its signature or its contents were changed."""
    url = (await api.call('GET', f'{BEST}/archive')).headers['location']
    head, token, name = url.rsplit('/', 2)
    body, _, signature = token.rpartition('.')
    other = (await api.call('GET', f'{RUN_PATH}/checkpoints/sampler_weights/best/archive')).headers['location']
    other_body = other.rsplit('/', 2)[1].rpartition('.')[0]
    for invalid in (
        f'{body}.{signature[:-1]}x',
        f'{other_body}.{signature}',
        f'.{signature}',
        body,
        'x' * 4000,
        '%00',
    ):
        assert (await api.http.get(f'{head}/{invalid}/{name}')).status_code == 401, invalid
    assert (await api.http.get(url)).status_code == 200
    api.gateway.clock.advance(timedelta(hours=1))
    assert (await api.http.get(url)).status_code == 401


async def test_link_to_a_deleted_checkpoint_is_not_found(api: TinkerCatalogue) -> None:
    """A link to a deleted checkpoint is not found."""
    url = (await api.call('GET', f'{BEST}/archive')).headers['location']
    await api.call('DELETE', BEST)
    assert (await api.http.get(url)).status_code == 404


@pytest.mark.parametrize('host', ['evil.example/x?', 'a b', '<script>', ''])
async def test_link_needs_a_valid_host_header(api: TinkerCatalogue, host: str) -> None:
    """A Host header that is not a host is refused, so that links cannot point elsewhere."""
    assert (await api.call('GET', f'{BEST}/archive', headers={'host': host})).status_code == 400


async def test_invalid_names_of_weights_are_refused(api: TinkerCatalogue) -> None:
    """Requests with invalid names of weights or runs are refused, and no checkpoint is deleted."""
    names = ['..', '.', '%2e%2e', '..%2f..', 'a%2fb', 'ü', 'a b', 'best.sampler', 'x' * 5000, '%00', "'--", '*']
    for name in names:
        for method, suffix in (('DELETE', ''), ('POST', '/publish'), ('GET', '/archive')):
            response = await api.call(method, f'{RUN_PATH}/checkpoints/weights/{name}{suffix}')
            assert response.status_code in {400, 404, 405}, (name, method, response.text)
    for kind in ('Weights', 'versions', '..', '%20'):
        assert (await api.call('DELETE', f'{RUN_PATH}/checkpoints/{kind}/best')).status_code in {400, 404, 405}
    for run_id in ('...', 'ü', 'x' * 300, 'a%2fb'):
        assert (await api.call('GET', f'training_runs/{run_id}')).status_code in {400, 404}
        assert (await api.call('GET', f'training_runs/{run_id}/checkpoints')).status_code in {400, 404}
    assert len((await api.get(f'{RUN_PATH}/checkpoints'))['checkpoints']) == 3


@pytest.mark.parametrize(
    'query',
    ['limit=0', 'limit=1001', 'limit=x', 'offset=-1', 'offset=99999999999999999999', 'limit=', 'access_scope=all'],
)
async def test_lists_refuse_invalid_queries(api: TinkerCatalogue, query: str) -> None:
    """The lists of runs, checkpoints and sessions refuse an invalid offset, limit or access scope."""
    for path in ('training_runs', 'checkpoints', 'sessions'):
        assert (await api.call('GET', f'{path}?{query}')).status_code == 400
