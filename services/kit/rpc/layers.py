"""The interceptor layers of a server, each a context manager around the handler of a call.

`server_layers` returns the layers, outermost first, except for `count_bytes`, which is the innermost one. The inner
layers and `Call.received` refuse calls, for example because of credentials, size or deadline. The outer layers convert
these refusals to statuses, and log, count and trace them. A call without valid credentials is counted, but not traced,
and its log line has level debug.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from functools import partial
from typing import Any, cast

import grpc
import structlog
from grpc_status import rpc_status
from opentelemetry import context as trace_context
from opentelemetry import propagate, trace

from twinkle_services.kit.byte_gate import ByteGate
from twinkle_services.kit.errors import (
    Cancelled,
    DeadlinePassed,
    DomainError,
    Internal,
    NotBuiltYet,
    PeerNotTrusted,
    QueueFull,
    QuotaExceeded,
)
from twinkle_services.kit.rpc.auth import Authenticator
from twinkle_services.kit.rpc.call import Call, cancelled_if_disconnected
from twinkle_services.kit.rpc.context import set_caller, set_request_id
from twinkle_services.kit.rpc.recheck import rechecked
from twinkle_services.kit.rpc.status import status_from_error
from twinkle_services.kit.telemetry import measures, spans

Layer = Callable[[Call], AbstractAsyncContextManager[None]]

REQUEST_ID_KEY = 'x-request-id'

_log = structlog.get_logger('rpc')
_tracer = trace.get_tracer('twinkle.rpc')


def server_layers(
    authenticator: Authenticator,
    *,
    is_supported: Callable[[str], bool],
    default_timeouts: Mapping[str, float],
    message_limit_bytes: int,
    call_limit: int = 4096,
    trusts: Callable[[Call], bool] = lambda call: True,
) -> list[Layer]:
    """Return the layers of a server, outermost first, except for the innermost layer `count_bytes`.

    Args:
        authenticator: Determines the caller.
        is_supported: Whether a method (with a leading slash) is implemented.
        default_timeouts: Timeouts in seconds by method, for calls without a deadline.
        message_limit_bytes: Maximum size of one received message.
        call_limit: Maximum number of concurrent calls; tenants share them.
        trusts: Whether the connection of a call belongs to a trusted caller.
    """
    return [
        trace_call,
        count_call,
        log_call,
        map_errors,
        trust_peer(trusts),
        authenticate_with(authenticator),
        name_request,
        share_calls(call_limit),
        refuse_unbuilt(is_supported),
        bound_call(default_timeouts, message_limit_bytes),
    ]


@asynccontextmanager
async def trace_call(call: Call) -> AsyncIterator[None]:
    """Record a server span as a child of the caller's span, if the caller is authenticated.

    Spans of other calls are never ended and thus not exported, so unauthenticated callers cannot fill or rotate the
    trace files.
    """
    parent = propagate.extract(call.metadata)
    with _tracer.start_as_current_span(
        call.label.removeprefix('/'),
        context=parent,
        kind=trace.SpanKind.SERVER,
        record_exception=False,
        set_status_on_exception=False,
        end_on_exit=False,
    ) as span:
        try:
            yield
        finally:
            if call.caller is not None:
                span.set_attributes(
                    {
                        'rpc.system.name': 'grpc',
                        'rpc.method': call.label.removeprefix('/'),
                        'rpc.response.status_code': call.status_name,
                        'twinkle.request_id': call.request_id,
                        'twinkle.tenant_id': call.caller.tenant_id,
                    }
                )
                if call.status_name in spans.SERVER_FAULTS:
                    span.set_attribute('error.type', call.status_name)
                    span.set_status(trace.StatusCode.ERROR, call.status_name)
                span.end()


@asynccontextmanager
async def count_call(call: Call) -> AsyncIterator[None]:
    """Count the call by status and measure its duration."""
    begin = time.perf_counter()
    try:
        yield
    finally:
        measures.rpc_calls.add(1, call.label, call.status_name)
        measures.rpc_seconds.record(time.perf_counter() - begin, call.label)


@asynccontextmanager
async def log_call(call: Call) -> AsyncIterator[None]:
    """Log the status of the call. Only failed calls of authenticated callers are logged above debug level."""
    begin = time.perf_counter()
    try:
        yield
    finally:
        write = _log.debug if call.status_name == 'OK' or call.caller is None else _log.info
        write(
            'call',
            method=call.label,
            status=call.status_name,
            milliseconds=round(1000 * (time.perf_counter() - begin), 2),
            request_id=call.request_id,
            tenant=call.caller.tenant_id if call.caller else '',
        )


@asynccontextmanager
async def map_errors(call: Call) -> AsyncIterator[None]:
    """Convert exceptions to statuses; unexpected ones become INTERNAL."""
    try:
        yield
    except asyncio.CancelledError:
        call.status_name = Cancelled.code.name
        raise
    except grpc.aio.AbortError:
        call.status_name = call.context.code().name if call.context.code() else 'UNKNOWN'
        raise
    except Exception as error:
        await _abort(call, _domain_error(error, call))


def _domain_error(error: BaseException, call: Call) -> DomainError:
    if isinstance(error, BaseExceptionGroup):
        # Task groups wrap the errors of their tasks.
        group = cast('BaseExceptionGroup[BaseException]', error)
        return _domain_error(group.exceptions[0], call)
    if isinstance(error, Internal) and not error.request_id:
        # An inner layer has logged the defect.
        return Internal(call.request_id)
    if isinstance(error, DomainError):
        return error
    _log.error('unexpected error', method=call.label, request_id=call.request_id, exc_info=error)
    return Internal(call.request_id)


async def _abort(call: Call, error: DomainError) -> None:
    call.status_name = error.code.name
    if isinstance(error, QuotaExceeded):
        measures.quota_refusals.add(1, error.quota)
    status = rpc_status.to_status(status_from_error(error))
    # Aborting replaces the trailing metadata, so the request id is set again.
    trailing = (*status.trailing_metadata, (REQUEST_ID_KEY, call.request_id))
    with cancelled_if_disconnected():
        await call.context.abort(status.code, status.details, trailing)


def trust_peer(trusts: Callable[[Call], bool]) -> Layer:
    """Create the layer that raises PeerNotTrusted for calls from untrusted connections."""

    @asynccontextmanager
    async def trust(call: Call) -> AsyncIterator[None]:
        if not trusts(call):
            _log.warning('untrusted peer refused', method=call.label, names=sorted(call.peer_names()))
            raise PeerNotTrusted()
        yield

    return trust


def authenticate_with(authenticator: Authenticator) -> Layer:
    """Create the layer that determines the caller, and cancels a stream once its caller is refused."""

    @asynccontextmanager
    async def authenticate(call: Call) -> AsyncIterator[None]:
        check = partial(authenticator.authenticate, call.method, call.metadata)
        call.caller = await check()
        set_caller(call.caller)
        interval = authenticator.recheck_interval if call.is_stream else None
        if interval is not None:
            call.recheck = check
        async with rechecked(check, interval=interval):
            yield

    return authenticate


@asynccontextmanager
async def name_request(call: Call) -> AsyncIterator[None]:
    """Use the request id that the caller sent, if any, and return the call's id in the trailing metadata."""
    call.request_id = call.metadata.get(REQUEST_ID_KEY, '')[:128] or call.request_id
    set_request_id(call.request_id)
    call.context.set_trailing_metadata(((REQUEST_ID_KEY, call.request_id),))
    yield


class CallShares:
    """Divides the concurrent calls of a server between tenants.

    A tenant may run at most as many calls as remain free: one tenant gets half of all calls, two tenants get a third
    each. Concurrency: use it from one event loop.
    """

    def __init__(self, call_limit: int) -> None:
        self._call_limit = call_limit
        self._counts: Counter[str] = Counter()

    @contextmanager
    def counted(self, tenant_id: str) -> Iterator[None]:
        """Count a call of a tenant while the block runs.

        Raises:
            QueueFull: The tenant already runs as many calls as remain free.
        """
        own, free = self._counts[tenant_id], self._call_limit - self._counts.total()
        if own >= free:
            raise QueueFull(queue_length=own, queue_limit=free)
        self._counts[tenant_id] += 1
        try:
            yield
        finally:
            self._counts[tenant_id] -= 1
            if not self._counts[tenant_id]:
                del self._counts[tenant_id]


def share_calls(call_limit: int) -> Layer:
    """Create the layer that divides the concurrent calls between tenants, and raises QueueFull for further calls.

    Calls that services make themselves are not limited, because the gateway already limits the tenants' calls.
    """
    shares = CallShares(call_limit)

    @asynccontextmanager
    async def share(call: Call) -> AsyncIterator[None]:
        if call.caller is None or call.caller.is_internal:
            yield
            return
        with shares.counted(call.caller.tenant_id):
            yield

    return share


def count_bytes(gate: ByteGate) -> Layer:
    """Create the innermost layer, which limits the bytes of messages in progress per tenant and in total.

    Calls that services make themselves are not limited, because the gateway has counted the tenants' messages.
    """

    @asynccontextmanager
    async def count(call: Call) -> AsyncIterator[None]:
        caller = call.caller
        if caller is None or caller.is_internal:
            yield
            return
        call.hold = gate.hold(caller.tenant_id)
        try:
            yield
        finally:
            call.hold.release()

    return count


def refuse_unbuilt(is_supported: Callable[[str], bool]) -> Layer:
    """Create the layer that raises NotBuiltYet for methods that are in the contract but not implemented."""

    @asynccontextmanager
    async def refuse_unbuilt_method(call: Call) -> AsyncIterator[None]:
        if not is_supported(call.method):
            raise NotBuiltYet(call.method[1:])
        yield

    return refuse_unbuilt_method


def bound_call(default_timeouts: Mapping[str, float], message_limit_bytes: int) -> Layer:
    """Create the layer that sets the limit of message sizes, and applies default timeouts to calls without a deadline.

    After the default timeout, a call fails with DeadlinePassed.
    """

    @asynccontextmanager
    async def bound(call: Call) -> AsyncIterator[None]:
        call.message_limit_bytes = message_limit_bytes
        remaining: Any = call.context.time_remaining()
        default = default_timeouts.get(call.method) if remaining is None else None
        scope = asyncio.timeout(default)
        try:
            async with scope:
                yield
        except TimeoutError as error:
            if scope.expired():
                raise DeadlinePassed() from error
            raise

    return bound


def current_trace_metadata() -> dict[str, str]:
    """Return the W3C trace headers of the current span."""
    carrier: dict[str, str] = {}
    propagate.inject(carrier, context=trace_context.get_current())
    return carrier
