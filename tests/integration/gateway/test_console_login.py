"""Tests of logins, sessions, one-time links and files of the console, with a real gateway."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from fixtures.certificates import make_authority, tls_of
from fixtures.console_client import INDEX, SCRIPT, ConsoleClient, console_client, make_files, parse_frames
from fixtures.gateway_upstream import TOKEN, Upstream, adapter_event, wait_until
from fixtures.running_gateway import (
    ADMIN,
    ADMIN_KEY,
    EVERY_SCOPE,
    RunningGateway,
    running_gateway,
    started_gateway,
)
from twinkle.api.gateway.v1 import (
    catalogue_service_pb2,
    fleet_service_pb2,
    key_service_pb2,
    key_service_pb2_grpc,
    metric_service_pb2,
)

LIST_RUNS = 'twinkle.api.gateway.v1.CatalogueService/ListRuns'
GET_RUN = 'twinkle.api.gateway.v1.CatalogueService/GetRun'
GET_METRICS = 'twinkle.api.gateway.v1.MetricService/GetMetrics'
WATCH_FLEET = 'twinkle.api.gateway.v1.FleetService/WatchFleet'
REGISTER = 'twinkle.api.gateway.v1.FleetService/Register'
SHORT = timedelta(milliseconds=200)
"""Time for which verified keys are cached; open streams are checked at this interval."""
HOURS = timedelta(hours=12)


@pytest.fixture
async def gateway(upstream: Upstream, tmp_path: Path) -> AsyncIterator[RunningGateway]:
    """A gateway with a console whose app consists of two files."""
    options = {'http_listen': '127.0.0.1:0', 'key_memory': SHORT, 'console_files': make_files(tmp_path / 'app')}
    async with running_gateway(tmp_path, upstream=upstream.address, **options) as running:
        yield running


@pytest.fixture
async def browser(gateway: RunningGateway) -> AsyncIterator[ConsoleClient]:
    """A browser without a session."""
    async with console_client(gateway) as client:
        yield client


async def revoke(gateway: RunningGateway, key_id: str) -> None:
    stub = key_service_pb2_grpc.KeyServiceStub(gateway.channel)
    await stub.RevokeKey(key_service_pb2.RevokeKeyRequest(key_id=key_id), metadata=ADMIN)


async def session_status(client: ConsoleClient) -> int:
    return (await client.http.get('/console/api/session')).status_code


async def make_link(client: ConsoleClient, secret: str = ADMIN_KEY) -> str:
    """Return a one-time link for a key."""
    response = await client.http.post('/console/api/links', headers={'authorization': f'Bearer {secret}'})
    assert response.status_code == 200, response.text
    return response.json()['link']


async def open_link(client: ConsoleClient, link: str) -> httpx.Response:
    return await client.http.post('/console/api/login', json={'link': link})


async def test_login_stores_a_protected_cookie(gateway: RunningGateway, browser: ConsoleClient) -> None:
    """A login returns the session and a cookie that hides the key and that scripts and other sites cannot use."""
    key = await gateway.make_key('alice', scopes=(1, 3))
    assert await session_status(browser) == 401
    response = await browser.http.post('/console/api/login', json={'key': key.secret})
    session = response.json()
    end = (gateway.clock.now() + HOURS).strftime('%Y-%m-%dT%H:%M:%SZ')
    facts = {'tenant_id': 'alice', 'key_id': key.key.key_id, 'scopes': ['data', 'train'], 'expire_time': end}
    assert session == facts
    cookie = response.headers['set-cookie']
    assert cookie.endswith('; Path=/console; Max-Age=43200; HttpOnly; SameSite=Strict')
    assert key.secret not in cookie
    assert response.headers['cache-control'] == 'no-store'
    assert (await browser.http.get('/console/api/session')).json() == facts


async def test_logout_deletes_the_cookie(browser: ConsoleClient) -> None:
    """A browser has no session after its logout."""
    await browser.log_in()
    assert await session_status(browser) == 200
    response = await browser.http.post('/console/api/logout')
    assert (response.status_code, response.content) == (204, b'')
    assert 'Max-Age=0' in response.headers['set-cookie']
    assert await session_status(browser) == 401


@pytest.mark.parametrize(
    ('body', 'status', 'reason', 'field'),
    [
        ({'key': 'tml-wrong'}, 401, 'CREDENTIALS_INVALID', ''),
        ({'key': TOKEN}, 401, 'CREDENTIALS_INVALID', ''),
        ({'key': 'tml-\n'}, 401, 'CREDENTIALS_INVALID', ''),
        ({'link': 'unknown'}, 401, 'CREDENTIALS_INVALID', ''),
        ({}, 400, 'INVALID_FIELD', 'key'),
        ({'key': ''}, 400, 'INVALID_FIELD', 'key'),
        ({'key': ADMIN_KEY, 'link': 'x'}, 400, 'INVALID_FIELD', 'key'),
        ({'key': 'x' * 1025}, 400, 'INVALID_FIELD', 'key'),
        ({'key': 7}, 400, 'INVALID_FIELD', 'key'),
        ({'key': ADMIN_KEY, 'tenant_id': 'alice'}, 400, 'INVALID_FIELD', 'tenant_id'),
        ({'key': 'x' * 5000}, 413, 'MESSAGE_TOO_LARGE', ''),
    ],
)
async def test_invalid_login_is_refused(
    browser: ConsoleClient, body: dict[str, Any], status: int, reason: str, field: str
) -> None:
    """A login that is malformed or has no valid key is refused, and sets no cookie."""
    response = await browser.http.post('/console/api/login', json=body)
    error = response.json()['error']
    assert (response.status_code, error['reason'], error['field']) == (status, reason, field)
    assert 'set-cookie' not in response.headers


async def test_login_needs_the_content_type_of_json(browser: ConsoleClient) -> None:
    """A login body with a content type that another site's page could send is refused."""
    content = json.dumps({'key': ADMIN_KEY})
    for headers in ({}, {'content-type': 'text/plain'}, {'content-type': 'application/x-www-form-urlencoded'}):
        response = await browser.http.post('/console/api/login', content=content, headers=headers)
        assert (response.status_code, response.json()['error']['field']) == (415, 'content-type')


async def test_requests_of_other_origins_are_refused(gateway: RunningGateway, browser: ConsoleClient) -> None:
    """Routes that change data refuse an `Origin` other than the host, even with valid credentials."""
    await browser.log_in()
    bearer_header = {'authorization': f'Bearer {ADMIN_KEY}'}
    host, port = gateway.http_address.split(':')
    for origin in ('null', 'https://evil.example', f'http://{host}', f'http://{host}:1{port}', ''):
        for path, headers in (
            ('api/login', {}),
            ('api/logout', {}),
            ('api/links', bearer_header),
            (f'rpc/{LIST_RUNS}', {'content-type': 'application/json'}),
        ):
            response = await browser.http.post(
                f'/console/{path}', json={'key': ADMIN_KEY}, headers={**headers, 'origin': origin}
            )
            assert response.status_code == 400, path
            assert response.json()['error']['field'] == 'origin'
            assert 'set-cookie' not in response.headers
    own = {'origin': f'http://{gateway.http_address}'}
    assert (await browser.http.post('/console/api/login', json={'key': ADMIN_KEY}, headers=own)).status_code == 200


async def test_cookie_is_secure_behind_a_proxy_with_tls(gateway: RunningGateway, browser: ConsoleClient) -> None:
    """If the browser's page uses TLS, the cookie is sent over TLS only, even if a proxy ends TLS."""
    headers = {'origin': f'https://{gateway.http_address}'}
    response = await browser.http.post('/console/api/login', json={'key': ADMIN_KEY}, headers=headers)
    assert response.headers['set-cookie'].endswith('; Secure')


async def test_session_ends_after_twelve_hours_also_within_a_stream(
    gateway: RunningGateway, browser: ConsoleClient
) -> None:
    """A cookie is refused after twelve hours, and a stream that it opened ends with UNAUTHENTICATED."""
    await browser.log_in()
    async with browser.stream(WATCH_FLEET, fleet_service_pb2.WatchFleetRequest()) as frames:
        last = await anext(frames)
        gateway.clock.advance(HOURS - timedelta(seconds=1))
        assert await session_status(browser) == 200
        gateway.clock.advance(timedelta(seconds=1))
        assert await session_status(browser) == 401
        async for item in frames:
            last = item
    result = parse_frames(last)
    assert (result.code, result.reason) == (16, 'CREDENTIALS_INVALID')


async def test_revoked_key_ends_its_sessions_and_streams(gateway: RunningGateway, browser: ConsoleClient) -> None:
    """Once a key is revoked, its cookies are refused, and its open streams end with UNAUTHENTICATED."""
    key = await gateway.make_key('alice', scopes=EVERY_SCOPE)
    await browser.log_in(key.secret)
    async with browser.stream(WATCH_FLEET, fleet_service_pb2.WatchFleetRequest()) as frames:
        last = await anext(frames)
        await revoke(gateway, key.key.key_id)
        assert await session_status(browser) == 401
        async for item in frames:
            last = item
    result = parse_frames(last)
    assert (result.code, result.reason) == (16, 'CREDENTIALS_INVALID')
    result = await browser.call(LIST_RUNS, catalogue_service_pb2.ListRunsRequest())
    assert (result.code, result.reason) == (16, 'CREDENTIALS_INVALID')


async def test_session_ends_with_its_key(gateway: RunningGateway, browser: ConsoleClient) -> None:
    """A session ends when its key expires."""
    key = await gateway.make_key('alice', ttl=timedelta(hours=1))
    response = await browser.http.post('/console/api/login', json={'key': key.secret})
    assert 'Max-Age=3600' in response.headers['set-cookie']
    gateway.clock.advance(timedelta(hours=1))
    assert await session_status(browser) == 401


@pytest.mark.parametrize('change', [lambda value: value[:-5], lambda value: 'AAAA' + value[4:], lambda value: 'ü/'])
async def test_changed_cookie_is_refused(browser: ConsoleClient, change: Any) -> None:
    """A cookie that the deployment did not create, or that was changed, is refused."""
    await browser.log_in()
    value = browser.http.cookies['twinkle_console']
    browser.http.cookies.clear()
    headers = {'cookie': f'twinkle_console={change(value)}'.encode()}
    assert (await browser.http.get('/console/api/session', headers=headers)).status_code == 401
    headers = {'cookie': f'twinkle_console={value}'.encode()}
    assert (await browser.http.get('/console/api/session', headers=headers)).status_code == 200


async def test_link_logs_in_once_even_in_a_race(browser: ConsoleClient) -> None:
    """If several requests use a link at the same time, exactly one succeeds."""
    link = await make_link(browser)
    responses = await asyncio.gather(*(open_link(browser, link) for _ in range(8)))
    assert sorted(response.status_code for response in responses) == [200] + [401] * 7
    assert await session_status(browser) == 200


async def test_link_expires_and_ends_with_its_key(gateway: RunningGateway, browser: ConsoleClient) -> None:
    """A link is refused after ten minutes, or once its key is revoked."""
    old = await make_link(browser)
    gateway.clock.advance(timedelta(minutes=10))
    assert (await open_link(browser, old)).status_code == 401
    key = await gateway.make_key('alice')
    link = await make_link(browser, key.secret)
    await revoke(gateway, key.key.key_id)
    assert (await open_link(browser, link)).status_code == 401


async def test_link_needs_a_key_and_not_a_cookie(browser: ConsoleClient) -> None:
    """A session cannot create a link that would outlive it."""
    await browser.log_in()
    response = await browser.http.post('/console/api/links')
    assert (response.status_code, response.json()['error']['reason']) == (401, 'CREDENTIALS_MISSING')


async def test_cookie_of_a_tenant_reads_nothing_of_another(
    gateway: RunningGateway, browser: ConsoleClient, upstream: Upstream
) -> None:
    """A browser sees no runs or metrics of another tenant; a request's key takes precedence over the cookie."""
    upstream.adapters.watch.changes.put_nowait(adapter_event('ad-1'))
    upstream.adapters.watch.changes.put_nowait(adapter_event('ad-2', tenant_id='bob'))
    secret = (await gateway.make_key('bob')).secret
    await browser.log_in(secret)

    async def runs(**headers: str) -> list[str]:
        result = await browser.call(LIST_RUNS, catalogue_service_pb2.ListRunsRequest(), **headers)
        return [run.run_id for run in catalogue_service_pb2.ListRunsResponse.FromString(result.messages[0]).runs]

    await wait_until(runs, lambda found: found == ['ad-2'])
    for headers in ({'x_twinkle_tenant': 'default'}, {'grpc_metadata_x_twinkle_tenant': 'default'}):
        assert await runs(**headers) == ['ad-2']
    for method, request in (
        (GET_RUN, catalogue_service_pb2.GetRunRequest(run_id='ad-1')),
        (GET_METRICS, metric_service_pb2.GetMetricsRequest(run_id='ad-1')),
    ):
        result = await browser.call(method, request)
        assert (result.code, result.reason) == (5, 'RUN_NOT_FOUND')
    assert await runs(authorization=f'Bearer {ADMIN_KEY}') == ['ad-1']
    result = await browser.call(LIST_RUNS, catalogue_service_pb2.ListRunsRequest(), authorization='Bearer tml-wrong')
    assert (result.code, result.reason) == (16, 'CREDENTIALS_INVALID')


async def test_files_are_served_with_headers_against_other_scripts(browser: ConsoleClient) -> None:
    """The page and its assets have a content security policy; only hashed assets may be cached."""
    redirect = await browser.http.get('/')
    assert (redirect.status_code, redirect.headers['location']) == (302, '/console/')
    for path, content, kind, cache in (
        ('/console/', INDEX, 'text/html; charset=utf-8', 'no-store'),
        ('/console/index.html', INDEX, 'text/html; charset=utf-8', 'no-store'),
        (
            '/console/assets/app-1a2b.js',
            SCRIPT,
            'text/javascript; charset=utf-8',
            'public, max-age=31536000, immutable',
        ),
    ):
        response = await browser.http.get(path)
        assert (response.status_code, response.content) == (200, content)
        assert (response.headers['content-type'], response.headers['cache-control']) == (kind, cache)
        assert response.headers['content-security-policy'].startswith("default-src 'none'; script-src 'self'")
        assert response.headers['x-content-type-options'] == 'nosniff'
        assert response.headers['referrer-policy'] == 'no-referrer'


@pytest.mark.parametrize(
    'path',
    [
        'assets/',
        'assets',
        'absent.js',
        '..%2fkey_pepper',
        '%2e%2e/key_pepper',
        '//etc/passwd',
        'assets/..%2findex.html',
    ],
)
async def test_paths_outside_the_listing_are_not_found(browser: ConsoleClient, path: str) -> None:
    """Only the listed names are served, and no path of a request leaves the folder."""
    assert (await browser.http.get(f'/console/{path}')).status_code == 404


async def test_console_can_be_disabled_or_unbuilt(tmp_path: Path) -> None:
    """A disabled console has no routes; without a built app, the console's page says how to build it."""
    options: dict[str, Any] = {'http_listen': '127.0.0.1:0', 'console_files': tmp_path / 'absent'}
    async with running_gateway(tmp_path, console=False, **options) as gateway, console_client(gateway) as client:
        for path in ('/', '/console/', '/console/api/session'):
            assert (await client.http.get(path)).status_code == 404
    async with running_gateway(tmp_path, **options) as gateway, console_client(gateway) as client:
        response = await client.http.get('/console/')
        assert (response.status_code, response.headers['content-type']) == (503, 'text/plain; charset=utf-8')
        assert './run console' in response.text


async def test_session_works_at_every_gateway_of_a_database(postgres_database: str, tmp_path: Path) -> None:
    """A second gateway accepts the first one's session but not its link; revoking the key ends the session at both."""
    options: dict[str, Any] = {
        'database_url': postgres_database,
        'futures': {'payload_dir': tmp_path / 'payloads'},
        'key_pepper': '0123456789abcdef' * 2,
        'key_memory': SHORT,
        'http_listen': '127.0.0.1:0',
    }
    async with (
        running_gateway(tmp_path / 'a', **options) as first,
        running_gateway(tmp_path / 'b', **options) as second,
        console_client(first) as here,
        console_client(second) as there,
    ):
        key = await first.make_key('alice')
        assert (await open_link(there, await make_link(here, key.secret))).status_code == 401
        await here.log_in(key.secret)
        there.http.cookies = here.http.cookies
        assert await session_status(there) == 200
        async with there.stream(WATCH_FLEET, fleet_service_pb2.WatchFleetRequest()) as frames:
            last = await anext(frames)
            await revoke(first, key.key.key_id)
            second.clock.advance(SHORT)
            async for item in frames:
                last = item
        assert parse_frames(last).reason == 'CREDENTIALS_INVALID'
        assert [await session_status(client) for client in (here, there)] == [401, 401]


async def test_console_calls_a_gateway_with_mutual_tls(tmp_path: Path) -> None:
    """The console works if clients need TLS and services need certificates; methods between services remain refused."""
    folder = make_authority(tmp_path / 'tls')
    async with started_gateway(tmp_path / 'state', tls=tls_of(folder, 'gateway')) as gateway:
        assert gateway.http is not None
        url, context = f'https://{gateway.http.address}', ssl.create_default_context(cafile=str(folder / 'ca.crt'))
        async with httpx.AsyncClient(base_url=url, verify=context, timeout=60) as http:
            client = ConsoleClient(http)
            response = await http.post('/console/api/login', json={'key': ADMIN_KEY})
            assert response.headers['set-cookie'].endswith('; Secure')
            result = await client.call(LIST_RUNS, catalogue_service_pb2.ListRunsRequest())
            assert (result.code, len(result.messages)) == (0, 1)
            refused = await client.call(REGISTER, fleet_service_pb2.RegisterRequest())
            assert (refused.code, refused.reason) == (7, 'SCOPE_MISSING')
