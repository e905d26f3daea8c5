"""Tests of checkpoint downloads with a browser's cookie, with a real checkpoint service."""

import io
import tarfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import httpx
import pytest

from fixtures.console_client import ConsoleClient, console_client
from fixtures.running_gateway import bearer
from fixtures.tinker_catalogue import RUN, TinkerCatalogue, tinker_catalogue
from twinkle.api.checkpoint.v1 import checkpoint_service_pb2, checkpoint_service_pb2_grpc
from twinkle.api.gateway.v1.catalogue_service_pb2 import PublishCheckpointRequest
from twinkle.api.gateway.v1.catalogue_service_pb2_grpc import CatalogueServiceStub
from twinkle.api.gateway.v1.key_service_pb2 import SCOPE_SAMPLE

PATH = f'twinkle://{RUN}/weights/best'
ADDRESS = f'/console/api/checkpoints/{RUN}/best'


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[TinkerCatalogue]:
    """A gateway with one checkpoint of Alice."""
    async with tinker_catalogue(tmp_path) as running:
        await running.save('best')
        yield running


@pytest.fixture
async def browser(api: TinkerCatalogue) -> AsyncIterator[ConsoleClient]:
    """A browser that is logged in as Alice."""
    async with console_client(api.gateway) as client:
        await client.log_in(api.keys['alice'])
        yield client


async def _archive(api: TinkerCatalogue) -> bytes:
    """Return the archive of the checkpoint, as gRPC streams it."""
    stub = checkpoint_service_pb2_grpc.CheckpointServiceStub(api.gateway.channel)
    request = checkpoint_service_pb2.DownloadCheckpointRequest(checkpoint_path=PATH)
    parts = stub.DownloadCheckpoint(request, metadata=bearer(api.keys['alice']))
    return b''.join([part.chunk.data async for part in parts])


def _reason(response: httpx.Response) -> str:
    return response.json()['error']['reason']


async def test_archive_is_one_file(api: TinkerCatalogue, browser: ConsoleClient) -> None:
    """A download is the PEFT folder as one archive, with its length and a file name."""
    response = await browser.http.get(ADDRESS)
    assert response.status_code == 200
    assert response.content == await _archive(api)
    assert int(response.headers['content-length']) == len(response.content)
    assert response.headers['content-disposition'] == f'attachment; filename="{RUN}-best.tar"'
    with tarfile.open(fileobj=io.BytesIO(response.content)) as archive:
        assert {'adapter_config.json', 'adapter_model.safetensors'} <= set(archive.getnames())


async def test_interrupted_download_resumes(api: TinkerCatalogue, browser: ConsoleClient) -> None:
    """A browser resumes at a byte with the file's tag; with another tag it receives the whole file."""
    whole = await browser.http.get(ADDRESS)
    tag = whole.headers['etag']
    headers = {'range': 'bytes=1000-', 'if-range': tag}
    rest = await browser.http.get(ADDRESS, headers=headers)
    assert (rest.status_code, rest.content) == (206, whole.content[1000:])
    changed = await browser.http.get(ADDRESS, headers={**headers, 'if-range': '"other"'})
    assert (changed.status_code, changed.content) == (200, whole.content)


@pytest.mark.parametrize(
    ('headers', 'status', 'reason'),
    [({'cookie': 'twinkle_console=x'}, 401, 'CREDENTIALS_INVALID'), ({'cookie': ''}, 401, 'CREDENTIALS_MISSING')],
)
async def test_session_is_needed(api: TinkerCatalogue, headers: Mapping[str, str], status: int, reason: str) -> None:
    """A request without a valid session is refused."""
    async with console_client(api.gateway) as client:
        response = await client.http.get(ADDRESS, headers=headers)
    assert (response.status_code, _reason(response)) == (status, reason)


async def test_key_needs_the_scope_train(api: TinkerCatalogue) -> None:
    """A key for sampling cannot download weights, as in the gRPC API."""
    key = await api.gateway.make_key('alice', scopes=(SCOPE_SAMPLE,))
    async with console_client(api.gateway) as client:
        await client.log_in(key.secret)
        response = await client.http.get(ADDRESS)
    assert (response.status_code, _reason(response)) == (403, 'SCOPE_MISSING')


async def test_checkpoints_of_other_tenants_do_not_exist(api: TinkerCatalogue) -> None:
    """Another tenant's checkpoint is not found until it is public."""
    async with console_client(api.gateway) as client:
        await client.log_in(api.keys['bob'])
        refused = await client.http.get(ADDRESS)
        assert (refused.status_code, _reason(refused)) == (404, 'CHECKPOINT_NOT_FOUND')
        request = PublishCheckpointRequest(checkpoint_path=PATH)
        await CatalogueServiceStub(api.gateway.channel).PublishCheckpoint(request, metadata=bearer(api.keys['alice']))
        assert (await client.http.get(ADDRESS)).content == await _archive(api)


async def test_unknown_names_and_other_sites_are_refused(browser: ConsoleClient) -> None:
    """An unknown or malformed name is refused, and so is a request from another site's page."""
    unknown = await browser.http.get(f'/console/api/checkpoints/{RUN}/other')
    assert (unknown.status_code, _reason(unknown)) == (404, 'CHECKPOINT_NOT_FOUND')
    for name in ('a%22b', 'a%0d%0ab', '..', '%2e%2e', 'a%2fb'):
        response = await browser.http.get(f'/console/api/checkpoints/{RUN}/{name}')
        assert response.status_code in (400, 404), name
        assert 'content-disposition' not in response.headers
    other = await browser.http.get(ADDRESS, headers={'origin': 'http://attacker.example'})
    assert (other.status_code, other.json()['error']['field']) == (400, 'origin')
