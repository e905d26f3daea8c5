"""Tests of mutual TLS over real sockets: access, refusals, and renewal of certificates in use."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest

from fixtures.certificates import EVERY_SERVICE, INTERNAL, make_authority, tls_of
from twinkle.api.server.v1 import server_service_pb2, server_service_pb2_grpc
from twinkle_services.checkpoint.config import CheckpointConfig
from twinkle_services.data.config import DataConfig
from twinkle_services.kit.certificates import make_certificates
from twinkle_services.kit.config import ServiceConfig
from twinkle_services.kit.rpc.auth import InternalAuthenticator
from twinkle_services.kit.rpc.channel import identity_metadata, open_channel, open_forwarding_channel
from twinkle_services.kit.rpc.server import RpcServer
from twinkle_services.kit.rpc.status import error_from_call
from twinkle_services.kit.tls import TlsConfig
from twinkle_services.model.config import ModelConfig
from twinkle_services.sampler.config import SamplerConfig

TOKEN = 'the-token-of-these-tests'
CONFIGS: dict[str, tuple[type[ServiceConfig], dict[str, str]]] = {
    'checkpoint': (CheckpointConfig, {}),
    'data': (DataConfig, {}),
    'model': (ModelConfig, {'base_model': 'tiny', 'checkpoint_address': 'nowhere:1'}),
    'sampler': (SamplerConfig, {'base_model': 'tiny', 'checkpoint_address': 'nowhere:1'}),
}
UNTRUSTED = {'no certificate', 'certificate of a foreign authority', 'plaintext'}


@pytest.fixture(scope='module')
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the deployment's certificates."""
    return make_authority(tmp_path_factory.mktemp('tls'), services=(*EVERY_SERVICE, 'stranger'))


@pytest.fixture(scope='module')
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with certificates of another authority for the same names."""
    return make_authority(tmp_path_factory.mktemp('foreign'))


@asynccontextmanager
async def _serving(service: str, tls: TlsConfig) -> AsyncIterator[RpcServer]:
    kind, fields = CONFIGS[service]
    config = kind.model_validate({**fields, 'internal_token': TOKEN, 'tls': tls})
    server = RpcServer(config, authenticator=InternalAuthenticator(TOKEN), endpoints=[])
    await server.start()
    try:
        yield server
    finally:
        await server.stop(timedelta())


async def _call(channel: grpc.aio.Channel, *, token: str = TOKEN) -> Any:
    """Call a method that every service serves."""
    stub = server_service_pb2_grpc.ServerServiceStub(channel)
    return await stub.GetServerInfo(
        server_service_pb2.GetServerInfoRequest(), timeout=10, metadata=identity_metadata(token)
    )


async def _status_of_call(address: str, tls: TlsConfig, *, token: str = TOKEN, service: str = '') -> grpc.StatusCode:
    """Return the status of a call on a channel without retries."""
    async with open_forwarding_channel(address, tls=tls, service=service) as channel:
        try:
            await _call(channel, token=token)
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


@pytest.mark.parametrize('service', INTERNAL)
async def test_call_needs_a_trusted_certificate_and_the_token(service: str, folder: Path, foreign: Path) -> None:
    """A call needs both the token and the certificate of an allowed service."""
    gateway = tls_of(folder, 'gateway')
    callers = {
        'plaintext': (TlsConfig(), TOKEN),
        'no certificate': (tls_of(folder, 'gateway', certificate=None, key=None), TOKEN),
        'certificate of a foreign authority': (tls_of(foreign, 'gateway', ca=folder / 'ca.crt'), TOKEN),
        'certificate of another service': (tls_of(folder, 'stranger'), TOKEN),
        'no token': (gateway, ''),
        'wrong token': (gateway, 'wrong'),
        'right': (gateway, TOKEN),
    }
    async with _serving(service, tls_of(folder, service)) as server:
        codes = {
            name: await _status_of_call(server.address, tls, token=token) for name, (tls, token) in callers.items()
        }
    assert codes == {
        **dict.fromkeys(UNTRUSTED, grpc.StatusCode.UNAVAILABLE),
        'certificate of another service': grpc.StatusCode.PERMISSION_DENIED,
        'no token': grpc.StatusCode.UNAUTHENTICATED,
        'wrong token': grpc.StatusCode.UNAUTHENTICATED,
        'right': grpc.StatusCode.OK,
    }


@pytest.mark.parametrize('service', INTERNAL)
async def test_services_accept_only_their_configured_callers(service: str, folder: Path) -> None:
    """A service accepts only the callers in its configuration, even if other callers have a valid token."""
    async with _serving(service, tls_of(folder, service)) as server:
        codes = {caller: await _status_of_call(server.address, tls_of(folder, caller)) for caller in EVERY_SERVICE}
    allowed = {caller for caller, code in codes.items() if code is grpc.StatusCode.OK}
    assert allowed == set(CONFIGS[service][0].callers)
    assert {codes[caller] for caller in set(codes) - allowed} == {grpc.StatusCode.PERMISSION_DENIED}


async def test_refusal_reveals_no_details(folder: Path) -> None:
    """A refusal does not contain the allowed names, file names or messages of libraries."""
    async with (
        _serving('model', tls_of(folder, 'model')) as server,
        open_forwarding_channel(server.address, tls=tls_of(folder, 'sampler')) as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _call(channel)
    error = error_from_call(caught.value, service='model')
    assert (error.reason, error.metadata()) == ('PEER_NOT_TRUSTED', {})
    assert not [word for word in ('gateway', 'sampler', str(folder), 'SSL') if word in str(caught.value.details())]


async def test_peers_can_be_named_by_dns_name(folder: Path) -> None:
    """A DNS name in a caller's certificate can make the caller trusted."""
    async with _serving('model', tls_of(folder, 'model', trusted_peers=('stranger',))) as server:
        assert await _status_of_call(server.address, tls_of(folder, 'stranger')) is grpc.StatusCode.OK
        assert await _status_of_call(server.address, tls_of(folder, 'gateway')) is grpc.StatusCode.PERMISSION_DENIED


async def test_tls_without_client_certificates(folder: Path) -> None:
    """A service without trusted peers encrypts connections and checks only the token."""
    async with _serving('data', tls_of(folder, 'data', trusted_peers=())) as server:
        caller = TlsConfig(ca=folder / 'ca.crt', trusted_peers=())
        assert await _status_of_call(server.address, caller) is grpc.StatusCode.OK
        assert await _status_of_call(server.address, caller, token='') is grpc.StatusCode.UNAUTHENTICATED


async def test_caller_verifies_the_service(folder: Path, foreign: Path) -> None:
    """A caller accepts a service only with the right authority and name."""
    async with _serving('data', tls_of(folder, 'data')) as server:
        named = tls_of(folder, 'gateway', server_names={'data': 'data', 'model': 'model'})
        for service, code in {'data': grpc.StatusCode.OK, 'model': grpc.StatusCode.UNAVAILABLE}.items():
            assert await _status_of_call(server.address, named, service=service) is code
        other = tls_of(folder, 'gateway', ca=foreign / 'ca.crt')
        assert await _status_of_call(server.address, other) is grpc.StatusCode.UNAVAILABLE


async def test_calls_of_a_service_are_encrypted(folder: Path) -> None:
    """A channel for a service's own calls uses TLS and adds the internal token."""
    async with (
        _serving('data', tls_of(folder, 'data')) as server,
        open_channel(server.address, internal_token=TOKEN, tls=tls_of(folder, 'gateway')) as channel,
    ):
        assert (await _call(channel, token='')).services[0].service == 'data'


async def test_renewed_certificate_is_shown_without_a_restart(tmp_path: Path) -> None:
    """New connections get a renewed certificate, but no certificate from incomplete files; open channels continue."""
    make_authority(tmp_path, services=('data', 'gateway'))
    gateway_tls = tls_of(tmp_path, 'gateway')
    async with (
        _serving('data', tls_of(tmp_path, 'data')) as server,
        open_channel(server.address, internal_token=TOKEN, tls=gateway_tls) as channel,
    ):
        await _call(channel, token='')
        first = await _presented_certificate(server.address, tmp_path)
        assert await _presented_certificate(server.address, tmp_path) == first
        (tmp_path / 'data.key').write_text('incomplete key')
        assert await _presented_certificate(server.address, tmp_path) == first
        make_certificates(tmp_path, {'data': (), 'gateway': ()}, is_forced=True)
        assert await _presented_certificate(server.address, tmp_path) != first
        await _call(channel, token='')


async def test_channels_are_opened_during_a_renewal(tmp_path: Path) -> None:
    """A channel that is opened during a renewal uses the previous certificate."""
    make_authority(tmp_path, services=('data', 'gateway'))
    gateway_tls = tls_of(tmp_path, 'gateway')
    async with _serving('data', tls_of(tmp_path, 'data')) as server:
        assert await _status_of_call(server.address, gateway_tls) is grpc.StatusCode.OK
        (tmp_path / 'gateway.key').write_text('incomplete key')
        assert await _status_of_call(server.address, gateway_tls) is grpc.StatusCode.OK


async def test_caller_presents_its_renewed_certificate(tmp_path: Path) -> None:
    """An open channel presents the renewed certificate, even through stubs that existed before the renewal."""
    make_authority(tmp_path, services=('data', 'gateway'))
    seen: list[bytes] = []
    server = grpc.aio.server(interceptors=[_CertificateRecorder(seen)])
    pair = [(tmp_path / f'data.{kind}').read_bytes() for kind in ('key', 'crt')]
    roots = (tmp_path / 'ca.crt').read_bytes()
    credentials = grpc.ssl_server_credentials([(pair[0], pair[1])], roots, require_client_auth=True)
    port = server.add_secure_port('127.0.0.1:0', credentials)
    await server.start()
    async with open_channel(f'127.0.0.1:{port}', tls=tls_of(tmp_path, 'gateway')) as channel:
        stub = server_service_pb2_grpc.ServerServiceStub(channel)
        for renew in (False, True, False):
            if renew:
                make_certificates(tmp_path, {'gateway': ()}, is_forced=True)
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.GetServerInfo(server_service_pb2.GetServerInfoRequest(), timeout=10)
    await server.stop(0)
    assert seen[0] != seen[1] == seen[2] == (tmp_path / 'gateway.crt').read_bytes()


async def test_replaced_authority_applies_to_new_connections(tmp_path: Path, folder: Path) -> None:
    """Replacing the file of authorities takes effect immediately for new connections."""
    make_authority(tmp_path, services=('data', 'gateway'))
    trusted = tmp_path / 'trusted.crt'
    trusted.write_bytes((tmp_path / 'ca.crt').read_bytes())
    async with _serving('data', tls_of(tmp_path, 'data', ca=trusted)) as server:
        assert await _status_of_call(server.address, tls_of(tmp_path, 'gateway')) is grpc.StatusCode.OK
        trusted.write_bytes((folder / 'ca.crt').read_bytes())
        assert await _status_of_call(server.address, tls_of(tmp_path, 'gateway')) is grpc.StatusCode.UNAVAILABLE
        new = tls_of(folder, 'gateway', ca=tmp_path / 'ca.crt')
        assert await _status_of_call(server.address, new) is grpc.StatusCode.OK


class _CertificateRecorder(grpc.aio.ServerInterceptor):
    """Records the certificates of callers and refuses their calls."""

    def __init__(self, seen: list[bytes]) -> None:
        self._seen = seen

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        del continuation, handler_call_details

        async def refuse(request: Any, context: Any) -> None:
            del request
            self._seen.append(context.auth_context()['x509_pem_cert'][0])
            await context.abort(grpc.StatusCode.ABORTED)

        return grpc.unary_unary_rpc_method_handler(refuse)


async def _presented_certificate(address: str, folder: Path) -> bytes:
    """Return the certificate that a new connection receives."""

    def connect() -> bytes:
        context = ssl.create_default_context(cafile=str(folder / 'ca.crt'))
        context.load_cert_chain(folder / 'gateway.crt', folder / 'gateway.key')
        context.set_alpn_protocols(['h2'])
        host, _, port = address.rpartition(':')
        with (
            socket.create_connection((host, int(port)), 10) as plain,
            context.wrap_socket(plain, server_hostname=host) as secure,
        ):
            return secure.getpeercert(binary_form=True) or b''

    return await asyncio.to_thread(connect)
