"""Tests of a gateway with TLS: clients with keys, services with certificates, and HTTPS."""

import asyncio
import ssl
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest

from fixtures.certificates import make_authority, tls_of
from fixtures.fake_samplers import FakeSampler
from fixtures.fleet import replica_of
from fixtures.gateway_upstream import TOKEN
from fixtures.running_gateway import ADMIN, ADMIN_KEY, failure_of, started_gateway
from twinkle.api.gateway.v1 import fleet_service_pb2 as fleet
from twinkle.api.gateway.v1 import session_service_pb2 as sessions
from twinkle.api.gateway.v1.fleet_service_pb2_grpc import FleetServiceStub
from twinkle.api.gateway.v1.session_service_pb2_grpc import SessionServiceStub
from twinkle_services.gateway.__main__ import assembled
from twinkle_services.gateway.config import GatewayConfig
from twinkle_services.kit.certificates import make_certificates
from twinkle_services.kit.clock import FakeClock
from twinkle_services.kit.rpc.channel import identity_metadata, open_forwarding_channel
from twinkle_services.kit.tls import TlsConfig

UNREACHABLE = FakeSampler(address='127.0.0.1:1')


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Folder with the certificates of the deployment."""
    return make_authority(tmp_path / 'tls')


def _client_of(folder: Path) -> TlsConfig:
    return TlsConfig(ca=folder / 'ca.crt', trusted_peers=())


async def _list_sessions(address: str, tls: TlsConfig) -> Any:
    async with open_forwarding_channel(address, tls=tls) as channel:
        return await SessionServiceStub(channel).ListSessions(sessions.ListSessionsRequest(), metadata=ADMIN)


async def _register(address: str, tls: TlsConfig, *, token: str = TOKEN) -> str:
    """Register a replica, and return the reason of the error or an empty string."""
    async with open_forwarding_channel(address, tls=tls) as channel:
        request = fleet.RegisterRequest(replica=replica_of(UNREACHABLE, 'r'))
        call = FleetServiceStub(channel).Register(request, metadata=identity_metadata(token))
        try:
            await call
        except grpc.aio.AioRpcError:
            return (await failure_of(call)).reason
    return ''


async def test_clients_need_a_key_and_no_certificate(tmp_path: Path, folder: Path) -> None:
    """The public address is encrypted and authenticates by key; plaintext is refused."""
    async with started_gateway(tmp_path / 'state', tls=tls_of(folder, 'gateway')) as gateway:
        assert not (await _list_sessions(gateway.server.address, _client_of(folder))).sessions
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _list_sessions(gateway.server.address, TlsConfig())
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_sampler_joins_only_with_its_certificate_and_the_token(tmp_path: Path, folder: Path) -> None:
    """A sampler joins only at the internal address, with the token and a sampler's certificate."""
    async with started_gateway(tmp_path / 'state', tls=tls_of(folder, 'gateway')) as gateway:
        public, internal = gateway.server.addresses
        assert await _register(public, _client_of(folder)) == 'PEER_NOT_TRUSTED'
        assert await _register(public, tls_of(folder, 'sampler')) == 'PEER_NOT_TRUSTED'
        assert await _register(internal, tls_of(folder, 'model')) == 'PEER_NOT_TRUSTED'
        assert await _register(internal, tls_of(folder, 'sampler'), token='') == 'CREDENTIALS_MISSING'
        assert await _register(internal, tls_of(folder, 'sampler')) == ''


async def test_internal_address_refuses_connections_without_a_certificate(tmp_path: Path, folder: Path) -> None:
    """A client with a valid key but no certificate cannot connect to the internal address."""
    async with started_gateway(tmp_path / 'state', tls=tls_of(folder, 'gateway')) as gateway:
        for tls in (_client_of(folder), TlsConfig()):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await _list_sessions(gateway.server.addresses[1], tls)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_public_certificate_without_internal_certificates(tmp_path: Path, folder: Path) -> None:
    """If only clients use TLS, samplers join at the internal address with the token."""
    public = {'certificate': folder / 'gateway.crt', 'key': folder / 'gateway.key'}
    async with started_gateway(tmp_path / 'state', public_tls=public) as gateway:
        assert not (await _list_sessions(gateway.server.address, _client_of(folder))).sessions
        assert await _register(gateway.server.addresses[1], TlsConfig()) == ''
        assert await _register(gateway.server.addresses[1], TlsConfig(), token='') == 'CREDENTIALS_MISSING'


async def test_certificate_that_cannot_be_loaded_ends_the_start(tmp_path: Path, folder: Path) -> None:
    """If certificate files become unusable before HTTPS listens, the start fails instead of waiting."""
    fields = {'state_dir': tmp_path / 'state', 'bootstrap_key': ADMIN_KEY, 'http_listen': '127.0.0.1:0'}
    public = {'certificate': folder / 'gateway.crt', 'key': folder / 'gateway.key'}
    config = GatewayConfig.model_validate({**fields, 'public_tls': public})
    async with assembled(config, clock=FakeClock()) as gateway:
        assert gateway.http is not None
        (folder / 'gateway.key').write_text('not a key')
        async with asyncio.timeout(30):
            with pytest.raises(OSError):  # noqa: PT011 (ssl.SSLError has no stable message)
                await gateway.http.start()


async def test_https_certificate_is_reloaded_when_it_changes(tmp_path: Path, folder: Path) -> None:
    """HTTPS uses the gateway's certificate and reloads it when it changes; plaintext gets no response."""
    async with started_gateway(tmp_path / 'state', tls=tls_of(folder, 'gateway')) as gateway:
        assert gateway.http is not None
        address = gateway.http.address
        context = ssl.create_default_context(cafile=str(folder / 'ca.crt'))
        async with httpx.AsyncClient(verify=context) as client:
            response = await client.get(f'https://{address}/healthz')
            assert (response.status_code, response.json()) == (200, {'status': 'serving'})
        with pytest.raises(httpx.HTTPError):
            async with httpx.AsyncClient() as client:
                await client.get(f'http://{address}/healthz')
        first = await _certificate_at(address, context)
        assert await _certificate_at(address, context) == first
        make_certificates(folder, {'gateway': ()}, is_forced=True)
        renewed = await _certificate_at(address, context)
        assert renewed != first
        assert ssl.DER_cert_to_PEM_cert(renewed) == (folder / 'gateway.crt').read_text()


async def test_openai_client_trusts_a_private_authority(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenAI's client trusts a private authority that SSL_CERT_FILE names."""
    async with started_gateway(tmp_path / 'state', tls=tls_of(folder, 'gateway')) as gateway:
        assert gateway.http is not None
        url = f'https://{gateway.http.address}/v1'
        for error_class in (openai.APIConnectionError, openai.InternalServerError):
            async with openai.AsyncOpenAI(base_url=url, api_key=ADMIN_KEY, max_retries=0) as client:
                with pytest.raises(error_class):
                    await client.models.list()
            monkeypatch.setenv('SSL_CERT_FILE', str(folder / 'ca.crt'))


async def _certificate_at(address: str, context: ssl.SSLContext) -> bytes:
    """Return the certificate that a new connection receives."""
    host, _, port = address.rpartition(':')
    _, writer = await asyncio.open_connection(host, int(port), ssl=context)
    certificate = writer.get_extra_info('ssl_object').getpeercert(binary_form=True)
    writer.close()
    await writer.wait_closed()
    return certificate
