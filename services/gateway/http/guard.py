"""Wraps every HTTP call: request id, span, log line, authentication, concurrency limit, error response.

The order equals the order of the RPC interceptors, so a refusal by an inner step is logged, counted and traced, and
receives a response. A call without valid credentials is only counted, and logged at debug level.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any

import structlog
from opentelemetry import propagate, trace
from starlette.requests import Request

from twinkle_services.gateway.http.body import ClientDisconnected
from twinkle_services.gateway.http.call import (
    CallMemory,
    HttpCall,
    JsonResponse,
    MemoryGates,
    Receive,
    Route,
    Send,
    event_bytes,
)
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.errors import Cancelled, Code, DomainError, Draining, Internal, QuotaExceeded
from twinkle_services.kit.rpc.auth import Authenticator
from twinkle_services.kit.rpc.context import set_caller, set_request_id
from twinkle_services.kit.rpc.layers import REQUEST_ID_KEY, CallShares
from twinkle_services.kit.rpc.recheck import rechecked
from twinkle_services.kit.rpc.service_ports import MAX_CONCURRENT_CALLS
from twinkle_services.kit.telemetry import measures

_log = structlog.get_logger('http')
_tracer = trace.get_tracer('twinkle.http')
_OPEN_CALLS = ''
"""Tenant under which the calls and the memory of open routes are counted; tenants have non-empty names."""


class Guard:
    """Wraps every route. Concurrency: all methods must be called from the event loop."""

    def __init__(
        self, authenticator: Authenticator, *, memory: MemoryGates, call_limit: int = MAX_CONCURRENT_CALLS
    ) -> None:
        self._authenticator = authenticator
        self._memory = memory
        self._shares = CallShares(call_limit)
        self._active: dict[asyncio.Future[None], HttpCall] = {}
        self.is_draining = False
        self.grpc_ports: Callable[[], Sequence[int]] = tuple
        """Ports on which this process serves gRPC, the public one first; empty if they are not advertised."""

    def wrap(self, route: Route) -> _GuardedRoute:
        """Return the ASGI app that serves one route."""
        return _GuardedRoute(self, route)

    async def drain(self, seconds: float) -> None:
        """Refuse new calls, and terminate running calls that take longer than `seconds`."""
        self.is_draining = True
        if self._active:
            await asyncio.wait(set(self._active), timeout=seconds)
        for work, call in self._active.items():
            call.termination = Draining()
            work.cancel()

    async def serve(self, call: HttpCall) -> None:
        """Serve a call, write an error response if it fails, and cancel its work if the client disconnects."""
        with _observed(call):
            work = asyncio.ensure_future(self._respond(call))
            disconnected = asyncio.ensure_future(_wait_for_disconnect(call))
            self._active[work] = call
            try:
                await asyncio.wait({work, disconnected}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                is_disconnected = not work.done()
                work.cancel()
                disconnected.cancel()
                await asyncio.gather(work, disconnected, return_exceptions=True)
                del self._active[work]
            await _write_error(call, work, is_disconnected=is_disconnected)

    async def _respond(self, call: HttpCall) -> None:
        if self.is_draining:
            raise Draining()
        call.caller = await self._authenticated(call)
        set_caller(call.caller)
        given = call.headers.get(REQUEST_ID_KEY, '') if call.caller else ''
        call.request_id = (given[:128] if given.isascii() and given.isprintable() else '') or call.request_id
        set_request_id(call.request_id)
        tenant_id = call.caller.tenant_id if call.caller else _OPEN_CALLS
        check = partial(self._authenticated, call)
        async with rechecked(check, interval=self._authenticator.recheck_interval):
            with self._shares.counted(tenant_id), ExitStack() as stack:
                call.memory = CallMemory(self._memory, tenant_id)
                stack.callback(call.memory.release)
                response = await call.route.serve(call)
                call.body_done.set()
                await response.write(call)

    async def _authenticated(self, call: HttpCall) -> Caller | None:
        if call.route.identify is not None:
            return await call.route.identify(call)
        return await self._authenticator.authenticate(call.route.method, call.route.credentials(call.headers))


@dataclass(frozen=True)
class _GuardedRoute:
    """ASGI app of one route."""

    guard: Guard
    route: Route

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        await self.guard.serve(HttpCall(self.route, scope, receive, send, dict(Request(scope).headers)))


async def _wait_for_disconnect(call: HttpCall) -> None:
    await call.body_done.wait()
    while (await call.receive())['type'] != 'http.disconnect':
        pass


@contextmanager
def _observed(call: HttpCall) -> Iterator[None]:
    """Count, log and trace the call.

    The span of a call without valid credentials is never ended, and therefore not exported. Otherwise, callers without
    credentials could fill the trace files.
    """
    begin = time.perf_counter()
    with _tracer.start_as_current_span(
        call.route.name, context=propagate.extract(call.headers), kind=trace.SpanKind.SERVER, end_on_exit=False
    ) as span:
        try:
            yield
        finally:
            measures.http_calls.add(1, call.route.name, call.outcome)
            tenant_id = call.caller.tenant_id if call.caller else ''
            if call.caller is not None:
                span.set_attributes(
                    {
                        'http.request.method': call.route.http_method,
                        'http.route': call.route.path,
                        'http.response.status_code': call.status,
                        'twinkle.request_id': call.request_id,
                        'twinkle.tenant_id': tenant_id,
                    }
                )
                if call.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                    span.set_attribute('error.type', str(call.status))
                    span.set_status(trace.StatusCode.ERROR, call.outcome)
                span.end()
            write = _log.debug if call.outcome == 'OK' or call.caller is None else _log.info
            write(
                'call',
                route=call.route.name,
                status=call.status,
                outcome=call.outcome,
                milliseconds=round(1000 * (time.perf_counter() - begin), 2),
                request_id=call.request_id,
                tenant=tenant_id,
            )


async def _write_error(call: HttpCall, work: asyncio.Future[None], *, is_disconnected: bool) -> None:
    """Record the error that ended the call, if any, as the outcome; send the error if the client can receive it."""
    failure = None if work.cancelled() else work.exception()
    if failure is None and not work.cancelled():
        return
    if (is_disconnected and call.termination is None) or isinstance(failure, ClientDisconnected):
        call.outcome = Cancelled.reason
        return
    error = call.termination or _domain_error(failure, call)
    call.outcome = error.reason
    if isinstance(error, QuotaExceeded):
        measures.quota_refusals.add(1, error.quota)
    if call.route.write_error is not None:
        if call.is_streaming or not call.status:
            await call.route.write_error(call, error)
        return
    body = call.route.errors.body_of(error, request_id=call.request_id)
    if call.is_streaming:
        await call.write(event_bytes(body, name=call.route.error_event), is_last=True)
    elif not call.status:
        await JsonResponse(body, call.route.errors.status_of(error), _error_headers(error)).write(call)


def _domain_error(failure: BaseException | None, call: HttpCall) -> DomainError:
    if isinstance(failure, BaseExceptionGroup):
        return _domain_error(failure.exceptions[0], call)  # pyright: ignore[reportUnknownArgumentType,reportUnknownMemberType]
    if isinstance(failure, DomainError) and not (isinstance(failure, Internal) and not failure.request_id):
        return failure
    if not isinstance(failure, Internal):
        _log.error('unforeseen error', route=call.route.name, request_id=call.request_id, exc_info=failure)
    return Internal(call.request_id)


def _error_headers(error: DomainError) -> dict[str, str]:
    """Return the retry headers that OpenAI-style SDKs read."""
    if error.code is Code.UNAUTHENTICATED:
        return {'www-authenticate': 'Bearer', 'x-should-retry': 'false'}
    if error.retry_after is None:
        return {'x-should-retry': 'false'}
    seconds = error.retry_after.total_seconds()
    return {
        'x-should-retry': 'true',
        'retry-after': str(max(1, math.ceil(seconds))),
        'retry-after-ms': str(round(1000 * seconds)),
    }
