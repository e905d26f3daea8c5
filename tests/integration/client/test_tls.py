"""A client of a gateway with TLS: trusted authorities, and errors for wrong addresses and certificates."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import grpc
import pytest

from fixtures.certificates import long_ago, make_authority
from fixtures.fake_gateway import API_KEY, FakeGateway
from twinkle_client import RetryableError, TwinkleClient, UsageError
from twinkle_client.rpc.address import Address
from twinkle_client.rpc.trust import diagnose_connection, read_authorities
from twinkle_services.kit.certificates import make_certificates

PAGES = 2
"""Number of pages, and therefore of calls, of the fake gateway's list."""


@asynccontextmanager
async def _secure_gateway(folder: Path) -> AsyncIterator[FakeGateway]:
    pair = [(folder / f'gateway.{kind}').read_bytes() for kind in ('key', 'crt')]
    gateway = FakeGateway(grpc.ssl_server_credentials([(pair[0], pair[1])]))
    await gateway.start()
    try:
        yield gateway
    finally:
        await gateway.stop()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the certificates of an authority."""
    return make_authority(tmp_path / 'tls', services=('gateway',))


async def _list_runs(address: str, ca: Path | None = None) -> None:
    """List runs with a client that retries for a minute."""
    client = TwinkleClient(address, API_KEY, ca=ca, retry_timeout=timedelta(seconds=60))
    try:
        await client.list_training_runs.aio()
    finally:
        await asyncio.to_thread(client.close)


async def _refusal(address: str, ca: Path | None = None) -> str:
    with pytest.raises(UsageError) as caught:
        await _list_runs(address, ca)
    return str(caught.value)


async def _diagnosis(address: str, folder: Path) -> str:
    return await diagnose_connection(Address.parse(address), read_authorities(str(folder / 'ca.crt')))


async def test_authority_comes_from_argument_or_environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The argument `ca` and environment variables set the trusted authority for every URL scheme with TLS."""
    async with _secure_gateway(folder) as gateway:
        await _list_runs(f'https://127.0.0.1:{gateway.port}', folder / 'ca.crt')
        monkeypatch.setenv('TWINKLE_CA', str(folder / 'ca.crt'))
        await _list_runs(f'grpcs://localhost:{gateway.port}')
        monkeypatch.delenv('TWINKLE_CA')
        monkeypatch.setenv('SSL_CERT_FILE', str(folder / 'ca.crt'))
        await _list_runs(f'https://localhost:{gateway.port}')
        assert len(gateway.metadata['ListRuns']) == 3 * PAGES


async def test_plaintext_call_to_a_tls_server_fails_immediately(folder: Path) -> None:
    """A plaintext call to a TLS server is not retried, and the error shows the URL with https."""
    async with _secure_gateway(folder) as gateway:
        assert f'write https://127.0.0.1:{gateway.port}' in await _refusal(f'127.0.0.1:{gateway.port}')


async def test_tls_call_to_a_plaintext_server_fails_immediately(gateway: FakeGateway, folder: Path) -> None:
    """A TLS call to a plaintext server is not retried, and the error shows the URL with http."""
    error = await _refusal(f'https://127.0.0.1:{gateway.port}', folder / 'ca.crt')
    assert f'write http://127.0.0.1:{gateway.port}' in error


async def test_untrusted_certificate_is_explained(folder: Path, tmp_path: Path) -> None:
    """A wrong authority, a wrong host and an expired certificate cause different errors, and no call is sent."""
    other = make_authority(tmp_path / 'other', services=('gateway',))
    make_certificates(tmp_path / 'old', {'gateway': ()}, now=long_ago())
    async with _secure_gateway(folder) as gateway:
        assert 'TWINKLE_CA' in await _refusal(f'https://127.0.0.1:{gateway.port}', other / 'ca.crt')
        assert 'not for 127.1;' in await _diagnosis(f'https://127.1:{gateway.port}', folder)
        assert await _diagnosis(f'https://127.0.0.1:{gateway.port}', folder) == ''
        assert gateway.calls == {}
    async with _secure_gateway(tmp_path / 'old') as gateway:
        assert 'expired' in await _diagnosis(f'https://127.0.0.1:{gateway.port}', tmp_path / 'old')


@pytest.mark.parametrize('scheme', ['http', 'https'])
async def test_unreachable_server_is_retryable(gateway: FakeGateway, folder: Path, scheme: str) -> None:
    """An unreachable server raises RetryableError with and without TLS."""
    port = gateway.port
    await gateway.stop()
    ca = folder / 'ca.crt' if scheme == 'https' else None
    client = TwinkleClient(f'{scheme}://127.0.0.1:{port}', API_KEY, ca=ca, retry_timeout=timedelta())
    with pytest.raises(RetryableError):
        await client.list_training_runs.aio()
    await asyncio.to_thread(client.close)
