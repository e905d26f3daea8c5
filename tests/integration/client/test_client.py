"""The client over a real socket: identity, retries, sessions, catalogue, downloads."""

import asyncio
from datetime import timedelta
from pathlib import Path

import grpc
import pytest

from fixtures.fake_gateway import API_KEY, FakeGateway
from fixtures.fake_wire import failure
from twinkle_client import (
    AccessError,
    BusyError,
    NotSupportedError,
    RetryableError,
    TwinkleClient,
    current_client,
    init_twinkle_client,
)

UNREACHABLE = failure(grpc.StatusCode.UNAVAILABLE, 'SERVICE_UNREACHABLE', retry_seconds=0.01, service='model')


async def test_call_carries_key_request_id_and_trace(gateway: FakeGateway, client: TwinkleClient) -> None:
    """Every call says who calls and which request it is."""
    await client.get_server_info.aio()
    metadata = gateway.metadata['GetServerInfo'][0]
    assert metadata['authorization'] == f'Bearer {API_KEY}'
    assert metadata['x-request-id'].startswith('rq-')


async def test_blocking_and_async_forms_agree(gateway: FakeGateway, client: TwinkleClient) -> None:
    """The same verb blocks a thread, fills a future or suspends a coroutine."""
    blocking = await asyncio.to_thread(client.get_server_info)
    future = await asyncio.wrap_future(client.get_server_info.submit())
    assert blocking == future == await client.get_server_info.aio()


async def test_retries_share_one_request_id(gateway: FakeGateway, client: TwinkleClient) -> None:
    """A call that is tried again is the same request to the server."""
    gateway.fail('GetServerInfo', *[UNREACHABLE] * 7)
    await client.get_server_info.aio()
    ids = {metadata['x-request-id'] for metadata in gateway.metadata['GetServerInfo']}
    assert len(gateway.calls['GetServerInfo']) == 8
    assert len(ids) == 1


async def test_full_queue_is_retried_after_the_time_told(gateway: FakeGateway, client: TwinkleClient) -> None:
    """RESOURCE_EXHAUSTED with a retry time is waited for."""
    gateway.fail('GetServerInfo', failure(grpc.StatusCode.RESOURCE_EXHAUSTED, 'QUEUE_FULL', retry_seconds=0.01))
    await client.get_server_info.aio()
    assert len(gateway.calls['GetServerInfo']) == 2


async def test_retrying_ends_with_the_server_s_reason(gateway: FakeGateway) -> None:
    """When the time for retries is over, the last refusal is raised."""
    client = TwinkleClient(f'127.0.0.1:{gateway.port}', API_KEY, retry_timeout=timedelta(0))
    gateway.fail('GetServerInfo', *[failure(grpc.StatusCode.RESOURCE_EXHAUSTED, 'QUEUE_FULL', retry_seconds=1)] * 9)
    with pytest.raises(BusyError) as caught:
        await client.get_server_info.aio()
    assert caught.value.reason == 'QUEUE_FULL'
    assert caught.value.retry_after == timedelta(seconds=1)
    await asyncio.to_thread(client.close)


async def test_call_survives_a_restart_of_the_server(gateway: FakeGateway, client: TwinkleClient) -> None:
    """A server that is gone for a moment costs a pause, nothing else."""
    await client.get_server_info.aio()
    await gateway.stop()
    call = asyncio.ensure_future(client.get_server_info.aio())
    await gateway.start()
    assert (await call).contract_version == 'v1'


async def test_unknown_key_is_refused_at_once(gateway: FakeGateway) -> None:
    """A wrong key is not tried again."""
    client = TwinkleClient(f'127.0.0.1:{gateway.port}', 'sk-wrong')
    with pytest.raises(AccessError):
        await client.create_session.aio()
    await asyncio.to_thread(client.close)


async def test_missing_method_is_not_supported(client: TwinkleClient) -> None:
    """UNIMPLEMENTED has a class of its own."""
    with pytest.raises(NotSupportedError):
        await client.get_training_run.aio('ad-1')


async def test_health_is_false_without_a_server() -> None:
    """Nobody listens: unhealthy, no exception."""
    client = TwinkleClient('127.0.0.1:1', API_KEY, retry_timeout=timedelta(0))
    assert not await client.health_check.aio()
    with pytest.raises(RetryableError):
        await client.get_server_info.aio()
    await asyncio.to_thread(client.close)


async def test_session_beats_and_ends(gateway: FakeGateway, client: TwinkleClient) -> None:
    """A session is begun, kept alive without help, and finished on leaving."""
    async with client:
        assert client.session_id == 'ss-1'
        async with asyncio.timeout(10):
            while len(gateway.calls['Heartbeat']) < 2:
                await client.get_server_info.aio()
    # Leaving ended it on the client's own thread; its call is answered by this loop.
    assert client.session_id == ''


async def test_pages_are_joined(client: TwinkleClient) -> None:
    """Lists hold all pages, those with filters too."""
    assert [run.run_id for run in await client.list_training_runs.aio()] == ['ad-1', 'ad-2']
    assert [item.name for item in await client.list_checkpoints.aio(is_public=True)] == ['a', 'b']


async def test_filters_of_lists_are_asked_for(gateway: FakeGateway, client: TwinkleClient) -> None:
    """On every page; another name than the contract's is refused before anybody is asked."""
    await client.list_training_runs.aio(user_metadata={'team': 'a'}, is_active=False)
    await client.list_checkpoints.aio('ad-1', user_metadata={'team': 'a'})
    for method in ('ListRuns', 'ListRunCheckpoints'):
        assert [dict(request.user_metadata) for request in gateway.calls[method]] == [{'team': 'a'}] * 2
    assert [request.is_active for request in gateway.calls['ListRuns']] == [False, False]
    assert [request.run_id for request in gateway.calls['ListRunCheckpoints']] == ['ad-1', 'ad-1']
    with pytest.raises(TypeError, match='model_name'):
        await client.list_training_runs.aio(model_name='tiny')  # type: ignore[call-arg]


async def test_download_goes_on_where_it_was_cut(gateway: FakeGateway, client: TwinkleClient, tmp_path: Path) -> None:
    """A cut download resumes at the bytes already there and unpacks the folder."""
    gateway.fail('AfterChunk', UNREACHABLE)
    folder = await client.download_checkpoint.aio('twinkle://ad-1/weights/a', tmp_path / 'out')
    assert sorted(path.name for path in folder.iterdir()) == ['adapter_config.json', 'adapter_model.safetensors']
    assert [request.offset for request in gateway.calls['DownloadCheckpoint']] == [0, 1 << 20]


async def test_init_makes_the_default_client(gateway: FakeGateway) -> None:
    """Components find the client that was initialised last."""
    client = await asyncio.to_thread(init_twinkle_client, f'127.0.0.1:{gateway.port}', API_KEY)
    assert current_client() is client
    await asyncio.to_thread(client.close)
    assert gateway.calls['FinishSession'][0].session_id == 'ss-1'
