"""The client over a real socket: identity, retries, sessions, catalogue and downloads."""

import asyncio
import sys
from datetime import timedelta
from pathlib import Path

import grpc
import pytest

from fixtures.fake_gateway import API_KEY, FakeGateway
from fixtures.fake_wire import failure
from twinkle.api.gateway.v1 import session_service_pb2
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


async def test_call_carries_key_and_request_id(gateway: FakeGateway, client: TwinkleClient) -> None:
    """Every call sends the API key and a request id."""
    await client.get_server_info.aio()
    metadata = gateway.metadata['GetServerInfo'][0]
    assert metadata['authorization'] == f'Bearer {API_KEY}'
    assert metadata['x-request-id'].startswith('rq-')


async def test_blocking_and_async_forms_agree(gateway: FakeGateway, client: TwinkleClient) -> None:
    """A remote method returns the same result when it blocks, returns a future or is awaited."""
    blocking = await asyncio.to_thread(client.get_server_info)
    future = await asyncio.wrap_future(client.get_server_info.submit())
    assert blocking == future == await client.get_server_info.aio()


async def test_retries_share_one_request_id(gateway: FakeGateway, client: TwinkleClient) -> None:
    """All attempts of a call have the same request id."""
    gateway.fail('GetServerInfo', *[UNREACHABLE] * 3)
    await client.get_server_info.aio()
    ids = {metadata['x-request-id'] for metadata in gateway.metadata['GetServerInfo']}
    assert len(gateway.calls['GetServerInfo']) == 4
    assert len(ids) == 1


async def test_full_queue_is_retried_after_the_retry_time(gateway: FakeGateway, client: TwinkleClient) -> None:
    """A call that fails with RESOURCE_EXHAUSTED and a retry time is retried."""
    gateway.fail('GetServerInfo', failure(grpc.StatusCode.RESOURCE_EXHAUSTED, 'QUEUE_FULL', retry_seconds=0.01))
    await client.get_server_info.aio()
    assert len(gateway.calls['GetServerInfo']) == 2


async def test_last_refusal_is_raised_after_the_retry_timeout(gateway: FakeGateway) -> None:
    """The last refusal is raised after the retry timeout."""
    client = TwinkleClient(f'127.0.0.1:{gateway.port}', API_KEY, retry_timeout=timedelta(0))
    gateway.fail('GetServerInfo', *[failure(grpc.StatusCode.RESOURCE_EXHAUSTED, 'QUEUE_FULL', retry_seconds=1)] * 9)
    with pytest.raises(BusyError) as caught:
        await client.get_server_info.aio()
    assert caught.value.reason == 'QUEUE_FULL'
    assert caught.value.retry_after == timedelta(seconds=1)
    await asyncio.to_thread(client.close)


async def test_call_survives_a_restart_of_the_server(gateway: FakeGateway, client: TwinkleClient) -> None:
    """A call during a restart of the server is retried until the server responds."""
    await client.get_server_info.aio()
    await gateway.stop()
    call = asyncio.ensure_future(client.get_server_info.aio())
    await gateway.start()
    assert (await call).contract_version == 'v1'


async def test_unknown_key_is_refused_immediately(gateway: FakeGateway) -> None:
    """An unknown key raises AccessError."""
    client = TwinkleClient(f'127.0.0.1:{gateway.port}', 'sk-wrong')
    with pytest.raises(AccessError):
        await client.create_session.aio()
    await asyncio.to_thread(client.close)


async def test_missing_method_is_not_supported(client: TwinkleClient) -> None:
    """An UNIMPLEMENTED error becomes NotSupportedError."""
    with pytest.raises(NotSupportedError):
        await client.get_training_run.aio('ad-1')


async def test_health_is_false_without_a_server() -> None:
    """A health check without a server returns False instead of raising an error."""
    client = TwinkleClient('127.0.0.1:1', API_KEY, retry_timeout=timedelta(0))
    assert not await client.health_check.aio()
    with pytest.raises(RetryableError):
        await client.get_server_info.aio()
    await asyncio.to_thread(client.close)


async def test_session_sends_heartbeats_and_ends(gateway: FakeGateway, client: TwinkleClient) -> None:
    """A session begins and ends with the context manager, and sends heartbeats in the background."""
    async with client:
        assert client.session_id == 'ss-1'
        async with asyncio.timeout(10):
            while len(gateway.calls['Heartbeat']) < 2:
                await client.get_server_info.aio()
    # Leaving the block has finished the session with a call to the gateway.
    assert client.session_id == ''


async def test_pages_are_joined(client: TwinkleClient) -> None:
    """Lists contain the items of all pages, with and without filters."""
    assert [run.run_id for run in await client.list_training_runs.aio()] == ['ad-1', 'ad-2']
    assert [item.name for item in await client.list_checkpoints.aio(is_public=True)] == ['a', 'b']


async def test_filters_of_lists_are_sent(gateway: FakeGateway, client: TwinkleClient) -> None:
    """Filters are sent with every page, and an unknown filter is refused before any call."""
    await client.list_training_runs.aio(user_metadata={'team': 'a'}, is_active=False)
    await client.list_checkpoints.aio('ad-1', user_metadata={'team': 'a'})
    for method in ('ListRuns', 'ListRunCheckpoints'):
        assert [dict(request.user_metadata) for request in gateway.calls[method]] == [{'team': 'a'}] * 2
    assert [request.is_active for request in gateway.calls['ListRuns']] == [False, False]
    assert [request.run_id for request in gateway.calls['ListRunCheckpoints']] == ['ad-1', 'ad-1']
    with pytest.raises(TypeError, match='model_name'):
        await client.list_training_runs.aio(model_name='tiny')  # type: ignore[call-arg]


async def test_interrupted_download_is_resumed(gateway: FakeGateway, client: TwinkleClient, tmp_path: Path) -> None:
    """An interrupted download resumes at the next missing byte and unpacks the folder."""
    gateway.fail('AfterChunk', UNREACHABLE)
    folder = await client.download_checkpoint.aio('twinkle://ad-1/weights/a', tmp_path / 'out')
    assert sorted(path.name for path in folder.iterdir()) == ['adapter_config.json', 'adapter_model.safetensors']
    assert [request.offset for request in gateway.calls['DownloadCheckpoint']] == [0, 1 << 20]


async def test_init_sets_the_default_client(gateway: FakeGateway) -> None:
    """`init_twinkle_client` sets the current client; closing the client finishes its session."""
    client = await asyncio.to_thread(init_twinkle_client, f'127.0.0.1:{gateway.port}', API_KEY)
    assert current_client() is client
    await asyncio.to_thread(client.close)
    assert gateway.calls['FinishSession'][0].session_id == 'ss-1'


@pytest.mark.parametrize(
    ('ending', 'reason'),
    [('pass', 'SUCCESS'), ('raise ValueError', 'FAILED'), ('raise KeyboardInterrupt', 'INTERRUPTED')],
)
async def test_session_of_a_program_ends_with_its_outcome(gateway: FakeGateway, ending: str, reason: str) -> None:
    """The session of a program ends with SUCCESS, with FAILED after an exception, or with INTERRUPTED after Ctrl-C."""
    program = f'import twinkle_client; twinkle_client.init_twinkle_client("127.0.0.1:{gateway.port}", "{API_KEY}")'
    process = await asyncio.create_subprocess_exec(
        sys.executable, '-c', f'{program}\n{ending}', stderr=asyncio.subprocess.DEVNULL
    )
    await process.wait()
    (request,) = gateway.calls['FinishSession']
    assert request.reason == session_service_pb2.FinishReason.Value(f'FINISH_REASON_{reason}')
