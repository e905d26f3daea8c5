"""Tests of routes for calls without a caller: their limits, their traces, and errors of other protocols."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from fixtures.futures import memory_gate
from twinkle_services.gateway.console.routes import ConsoleErrors
from twinkle_services.gateway.http.call import HttpCall, JsonResponse, MemoryGates, Response, Route
from twinkle_services.gateway.http.guard import Guard
from twinkle_services.gateway.http.server import make_app
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.errors import DomainError, QueueFull

METHOD = '/twinkle.api.server.v1.ServerService/GetServerInfo'


class AnyTenant:
    """Authenticates each call as the tenant in its `authorization` header."""

    recheck_interval = None

    async def authenticate(self, method: str, metadata: Any) -> Caller:
        """Return the caller."""
        del method
        return Caller(tenant_id=metadata['authorization'])


class Held:
    """Calls that wait until a test releases them."""

    def __init__(self) -> None:
        self.entered = asyncio.Semaphore(0)
        self.release = asyncio.Event()

    async def serve(self, call: HttpCall) -> Response:
        """Wait for the release, and return the caller and the request id."""
        self.entered.release()
        await self.release.wait()
        return JsonResponse({'tenant': call.caller.tenant_id if call.caller else None, 'id': call.request_id})


async def no_caller(call: HttpCall) -> Caller | None:
    return None


async def write_text(call: HttpCall, error: DomainError) -> None:
    await call.begin(200, 'text/plain')
    await call.write(error.reason.encode(), is_last=True)


@asynccontextmanager
async def client_of(held: Held, *, call_limit: int) -> AsyncIterator[httpx.AsyncClient]:
    """Serve an open route, a route for tenants, and an open route with errors as text."""
    fields: dict[str, Any] = {'http_method': 'GET', 'method': METHOD, 'serve': held.serve, 'errors': ConsoleErrors()}
    routes = [
        Route(path='/open', name='open', identify=no_caller, **fields),
        Route(path='/text', name='text', identify=no_caller, write_error=write_text, **fields),
        Route(path='/tenant', name='tenant', **fields),
    ]
    memory = MemoryGates(bodies=memory_gate(), work=memory_gate())
    app = make_app(routes, Guard(AnyTenant(), memory=memory, call_limit=call_limit))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url='http://test') as client:
        yield client


async def test_open_calls_share_the_limit_of_one_tenant() -> None:
    """Any number of open calls takes at most half of the slots, so that calls with a key are served."""
    held = Held()
    async with client_of(held, call_limit=4) as client:
        running = [asyncio.ensure_future(client.get('/open')) for _ in range(2)]
        for _ in running:
            await held.entered.acquire()
        refused = await client.get('/open')
        assert (refused.status_code, refused.json()['error']['reason']) == (429, QueueFull.reason)
        tenant = asyncio.ensure_future(client.get('/tenant', headers={'authorization': 'alice'}))
        await held.entered.acquire()
        held.release.set()
        assert [(await call).json()['tenant'] for call in (*running, tenant)] == [None, None, 'alice']


async def test_open_call_does_not_choose_its_request_id() -> None:
    """Callers without credentials cannot choose the request id, which is written to logs."""
    held = Held()
    held.release.set()
    async with client_of(held, call_limit=4) as client:
        for path, is_kept in (('/open', False), ('/tenant', True)):
            headers = {'x-request-id': 'chosen', 'authorization': 'alice'}
            response = await client.get(path, headers=headers)
            assert (response.json()['id'] == 'chosen') is is_kept


@pytest.mark.parametrize(('path', 'status', 'text'), [('/text', 200, 'QUEUE_FULL')])
async def test_route_writes_errors_in_its_protocol(path: str, status: int, text: str) -> None:
    """A route with its own protocol also uses this protocol for the errors of the guard."""
    async with client_of(Held(), call_limit=0) as client:
        response = await client.get(path)
        assert (response.status_code, response.text) == (status, text)
