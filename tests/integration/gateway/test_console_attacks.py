"""Tests that the console allows no calls of methods between services, for every combination of credentials."""

import stat
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest

from fixtures.certificates import make_authority, tls_of
from fixtures.console_client import WEB_TYPE, ConsoleClient, WebResult, console_client, frame, parse_frames
from fixtures.every_call import methods
from fixtures.fake_samplers import FakeSampler
from fixtures.fleet import replica_of
from fixtures.gateway_upstream import TOKEN, Upstream
from fixtures.running_gateway import ADMIN, ADMIN_KEY, failure_of, running_gateway
from twinkle.api.gateway.v1 import fleet_service_pb2, session_service_pb2
from twinkle.api.gateway.v1.fleet_service_pb2_grpc import FleetServiceStub
from twinkle.api.gateway.v1.session_service_pb2_grpc import SessionServiceStub
from twinkle_services.gateway.__main__ import assembled
from twinkle_services.gateway.config import GatewayConfig
from twinkle_services.gateway.console.routes import open_console
from twinkle_services.gateway.credentials import Access, requirement_of
from twinkle_services.kit.clock import FakeClock
from twinkle_services.kit.rpc.channel import identity_metadata, open_forwarding_channel

METHODS = [f'{method.containing_service.full_name}/{method.name}' for method in methods()]
INTERNAL = [method for method in METHODS if requirement_of(method) is Access.INTERNAL]
REGISTER = 'twinkle.api.gateway.v1.FleetService/Register'
LIST_RUNS = 'twinkle.api.gateway.v1.CatalogueService/ListRuns'
IDENTITY = {'x-twinkle-internal': '1', 'x-twinkle-tenant': 'default', 'x-twinkle-scopes': 'admin,operator'}
"""Headers that services use to identify their calls."""


@pytest.fixture(params=[TOKEN, ''], ids=['token', 'open'])
async def client(request: Any, upstream: Upstream, tmp_path: Path) -> AsyncIterator[ConsoleClient]:
    """A browser without a session. Its gateway trusts services with the token, or all callers without a key."""
    options = {'http_listen': '127.0.0.1:0', 'internal_token': request.param}
    async with (
        running_gateway(tmp_path, upstream=upstream.address, **options) as gateway,
        console_client(gateway) as browser,
    ):
        yield browser


async def result_of(client: ConsoleClient, method: str, headers: dict[str, str], body: bytes = b'') -> WebResult:
    given = {'content-type': WEB_TYPE, **headers}
    response = await client.http.post(f'/console/rpc/{method}', content=frame(body), headers=given)
    assert response.status_code == 200
    return parse_frames(response.content)


def registration() -> bytes:
    """Return a request with which a sampler joins the fleet."""
    replica = replica_of(FakeSampler(address='127.0.0.1:1'), 'r')
    return fleet_service_pb2.RegisterRequest(replica=replica).SerializeToString()


async def test_methods_between_services_are_refused_for_every_key(client: ConsoleClient) -> None:
    """A key with all scopes cannot call the services' internal methods, even with the headers of a service."""
    assert len(INTERNAL) >= 9
    await client.log_in()
    for method in INTERNAL:
        for headers in ({}, IDENTITY, {'authorization': f'Bearer {ADMIN_KEY}'}):
            result = await result_of(client, method, headers)
            assert result.code in {7, 12}, method
            assert result.reason in {'SCOPE_MISSING', 'NOT_BUILT_YET'}, method
    assert (await result_of(client, REGISTER, IDENTITY, registration())).reason == 'SCOPE_MISSING'


@pytest.mark.parametrize(
    ('authorization', 'reason'),
    [
        (None, 'CREDENTIALS_MISSING'),
        ('', 'CREDENTIALS_MISSING'),
        ('Bearer', 'CREDENTIALS_MISSING'),
        ('Basic YTpi', 'CREDENTIALS_MISSING'),
        (f'Bearer {TOKEN}', 'CREDENTIALS_INVALID'),
        (f'Bearer {ADMIN_KEY}, Bearer {ADMIN_KEY}', 'CREDENTIALS_INVALID'),
        (f'Bearer {ADMIN_KEY}\tx', 'CREDENTIALS_INVALID'),
    ],
)
async def test_calls_without_a_key_are_not_forwarded(
    client: ConsoleClient, authorization: str | None, reason: str
) -> None:
    """The console refuses every method without a valid key, even if the gRPC server trusts callers without a key."""
    headers = {**IDENTITY, **({} if authorization is None else {'authorization': authorization})}
    for method in METHODS:
        result = await result_of(client, method, headers, registration() if method == REGISTER else b'')
        assert (result.code, result.reason) == (16, reason), method


async def test_header_takes_precedence_over_the_cookie(client: ConsoleClient) -> None:
    """If the `Authorization` header of a request is unusable, the cookie is not used instead."""
    await client.log_in()
    assert (await result_of(client, LIST_RUNS, {})).code == 0
    for value in ('', 'Basic YTpi', 'Bearer tml-wrong', f'Bearer {TOKEN}'):
        assert (await result_of(client, LIST_RUNS, {'authorization': value})).code == 16


async def test_repeated_headers_do_not_add_credentials(client: ConsoleClient) -> None:
    """If a header occurs twice, its first value counts for all checks."""
    content, url = frame(b''), f'/console/rpc/{LIST_RUNS}'
    valid, invalid = ('authorization', f'Bearer {ADMIN_KEY}'), ('authorization', 'Bearer tml-wrong')
    for pair in ([valid, invalid], [invalid, valid]):
        headers = [('content-type', WEB_TYPE), *pair, *IDENTITY.items()]
        result = parse_frames((await client.http.post(url, content=content, headers=headers)).content)
        assert (result.code == 0) == (pair[0] is valid)


async def test_socket_needs_certificates_for_methods_between_services(tmp_path: Path) -> None:
    """A socket of a server with mutual TLS accepts keys but not the token, because its callers have no certificate."""
    folder = make_authority(tmp_path / 'tls')
    config = GatewayConfig.model_validate(
        {
            'state_dir': tmp_path / 'state',
            'bootstrap_key': ADMIN_KEY,
            'internal_token': TOKEN,
            'internal_listen': '127.0.0.1:0',
            'tls': tls_of(folder, 'gateway'),
        }
    )
    async with assembled(config, clock=FakeClock()) as gateway:
        address = gateway.server.listen_on_socket(tmp_path / 's')
        await gateway.server.start()
        try:
            async with open_forwarding_channel(address) as channel:
                sessions = SessionServiceStub(channel).ListSessions(
                    session_service_pb2.ListSessionsRequest(), metadata=ADMIN
                )
                assert not (await sessions).sessions
                request = fleet_service_pb2.RegisterRequest.FromString(registration())
                call = FleetServiceStub(channel).Register(request, metadata=identity_metadata(TOKEN))
                assert (await failure_of(call)).reason == 'PEER_NOT_TRUSTED'
        finally:
            await gateway.server.stop(timedelta())


class SocketServer:
    """Records the path of a socket."""

    def __init__(self) -> None:
        self.methods: dict[str, bool] = {}
        self.path = Path()

    def listen_on_socket(self, path: Path) -> str:
        """Record the path."""
        self.path = path
        return f'unix:{path}'


async def test_socket_is_private_and_removed(tmp_path: Path) -> None:
    """Only the gateway's user can reach the socket, and its folder is removed at the end."""
    config = GatewayConfig(state_dir=tmp_path, http_listen='127.0.0.1:0')
    server = SocketServer()
    async with AsyncExitStack() as stack:
        unused = cast(Any, None)
        assert open_console(config, cast(Any, server), unused, stack, checkpoints=unused, clock=FakeClock())
        folder = server.path.parent
        assert stat.S_IMODE(folder.stat().st_mode) == stat.S_IRWXU
        assert len(str(server.path)) < 100
    assert not folder.exists()
