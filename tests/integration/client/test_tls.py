"""A client of a gateway with TLS: whom it believes, and what it says where the address or the trust is wrong."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import grpc
import pytest

from fixtures.certificates import long_ago, make_authority
from fixtures.fake_gateway import API_KEY, FakeGateway
from services.kit.certificates import make_certificates
from twinkle_client import RetryableError, TwinkleClient, UsageError
from twinkle_client.rpc.address import Address
from twinkle_client.rpc.trust import diagnose_connection, read_authorities

PAGES = 2
"""Calls that listing takes there."""


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
    """An authority's folder."""
    return make_authority(tmp_path / 'tls', services=('gateway',))


async def _list_runs(address: str, ca: Path | None = None) -> None:
    """List runs as a client does that is patient for a minute."""
    client = TwinkleClient(address, API_KEY, ca=ca, retry_timeout=timedelta(seconds=60))
    try:
        await client.list_training_runs.aio()
    finally:
        await asyncio.to_thread(client.close)


async def _refusal(address: str, ca: Path | None = None) -> str:
    with pytest.raises(UsageError) as caught:
        await _list_runs(address, ca)
    return str(caught.value)


async def _explained(address: str, folder: Path) -> str:
    return await diagnose_connection(Address.parse(address), read_authorities(str(folder / 'ca.crt')))


async def test_authority_comes_from_argument_or_environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Either way, under every scheme that means TLS."""
    async with _secure_gateway(folder) as gateway:
        await _list_runs(f'https://127.0.0.1:{gateway.port}', folder / 'ca.crt')
        monkeypatch.setenv('TWINKLE_CA', str(folder / 'ca.crt'))
        await _list_runs(f'grpcs://localhost:{gateway.port}')
        monkeypatch.delenv('TWINKLE_CA')
        monkeypatch.setenv('SSL_CERT_FILE', str(folder / 'ca.crt'))
        await _list_runs(f'https://localhost:{gateway.port}')
        assert len(gateway.metadata['ListRuns']) == 3 * PAGES


async def test_plaintext_to_a_server_with_tls_is_told_at_once(folder: Path) -> None:
    """Waiting would not help: the address has to be written otherwise, and how is said."""
    async with _secure_gateway(folder) as gateway:
        assert f'write https://127.0.0.1:{gateway.port}' in await _refusal(f'127.0.0.1:{gateway.port}')


async def test_tls_to_a_server_without_is_told_at_once(gateway: FakeGateway, folder: Path) -> None:
    """The reverse."""
    told = await _refusal(f'https://127.0.0.1:{gateway.port}', folder / 'ca.crt')
    assert f'write http://127.0.0.1:{gateway.port}' in told


async def test_certificate_that_is_not_believed_is_told(folder: Path, tmp_path: Path) -> None:
    """Another authority, another name, one that expired: each with its own cure, and nothing is sent."""
    other = make_authority(tmp_path / 'other', services=('gateway',))
    make_certificates(tmp_path / 'old', {'gateway': ()}, now=long_ago())
    async with _secure_gateway(folder) as gateway:
        assert 'TWINKLE_CA' in await _refusal(f'https://127.0.0.1:{gateway.port}', other / 'ca.crt')
        assert 'not for 127.1;' in await _explained(f'https://127.1:{gateway.port}', folder)
        assert await _explained(f'https://127.0.0.1:{gateway.port}', folder) == ''
        assert gateway.calls == {}
    async with _secure_gateway(tmp_path / 'old') as gateway:
        assert 'expired' in await _explained(f'https://127.0.0.1:{gateway.port}', tmp_path / 'old')


@pytest.mark.parametrize('scheme', ['http', 'https'])
async def test_server_that_is_away_stays_one_to_be_waited_for(gateway: FakeGateway, folder: Path, scheme: str) -> None:
    """Only what no waiting can mend is told as such."""
    port = gateway.port
    await gateway.stop()
    ca = folder / 'ca.crt' if scheme == 'https' else None
    client = TwinkleClient(f'{scheme}://127.0.0.1:{port}', API_KEY, ca=ca, retry_timeout=timedelta())
    with pytest.raises(RetryableError):
        await client.list_training_runs.aio()
    await asyncio.to_thread(client.close)
