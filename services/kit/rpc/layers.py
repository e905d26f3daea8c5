"""The layers around every call, outermost first in `server_layers`.

The order is a rule with a test: refusals of the inner layers (credentials, size, deadline)
must be mapped, logged, counted and traced by the outer ones.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, cast

import grpc
import structlog
from grpc_status import rpc_status
from opentelemetry import context as trace_context
from opentelemetry import propagate, trace
from prometheus_client import Counter as CallCounter
from prometheus_client import Histogram

from services.kit.byte_gate import ByteGate
from services.kit.errors import Cancelled, DeadlinePassed, DomainError, Internal, NotBuiltYet, PeerNotTrusted, QueueFull
from services.kit.ids import new_id
from services.kit.rpc.auth import Authenticator
from services.kit.rpc.call import Call
from services.kit.rpc.context import set_caller, set_request_id
from services.kit.rpc.status import status_from_error

Layer = Callable[[Call], AbstractAsyncContextManager[None]]

REQUEST_ID_KEY = 'x-request-id'

_log = structlog.get_logger('rpc')
_tracer = trace.get_tracer('twinkle.rpc')
_calls = CallCounter('twinkle_rpc_calls_total', 'Calls served, by method and status.', ('method', 'status'))
_seconds = Histogram(
    'twinkle_rpc_seconds',
    'Time to serve a call.',
    ('method',),
    buckets=(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 30, 120),
)


def server_layers(
    authenticator: Authenticator,
    *,
    is_supported: Callable[[str], bool],
    default_timeouts: Mapping[str, float],
    message_limit_bytes: int,
    call_limit: int = 4096,
    trusts: Callable[[Call], bool] = lambda call: True,
) -> list[Layer]:
    """Return the layers of a server, outermost first.

    Args:
        authenticator: tells who calls.
        is_supported: whether a method (with leading slash) is built.
        default_timeouts: seconds a method may take where the caller sets no deadline.
        message_limit_bytes: most bytes of one received message.
        call_limit: calls that the server takes at a time; tenants share them.
        trusts: whether a call came over a connection of somebody who may call.
    """
    return [
        trace_call,
        name_request,
        count_call,
        log_call,
        map_errors,
        trust_peer(trusts),
        authenticate_with(authenticator),
        share_calls(call_limit),
        refuse_unbuilt(is_supported),
        bound_call(default_timeouts, message_limit_bytes),
    ]


@asynccontextmanager
async def trace_call(call: Call) -> AsyncIterator[None]:
    """Open a server span as a child of the caller's."""
    parent = propagate.extract(call.metadata)
    with _tracer.start_as_current_span(
        call.method[1:],
        context=parent,
        kind=trace.SpanKind.SERVER,
        record_exception=False,
        set_status_on_exception=False,
    ) as span:
        try:
            yield
        finally:
            span.set_attribute('rpc.status', call.status_name)
            span.set_attribute('twinkle.request_id', call.request_id)
            if call.caller is not None:
                span.set_attribute('twinkle.tenant_id', call.caller.tenant_id)
            if call.status_name != 'OK':
                span.set_status(trace.StatusCode.ERROR, call.status_name)


@asynccontextmanager
async def name_request(call: Call) -> AsyncIterator[None]:
    """Take the caller's request id or give one, and tell it in the trailing metadata."""
    call.request_id = call.metadata.get(REQUEST_ID_KEY, '')[:128] or new_id('rq')
    set_request_id(call.request_id)
    call.context.set_trailing_metadata(((REQUEST_ID_KEY, call.request_id),))
    yield


@asynccontextmanager
async def count_call(call: Call) -> AsyncIterator[None]:
    """Count the call by its status and measure its time."""
    begin = time.perf_counter()
    try:
        yield
    finally:
        _calls.labels(call.method, call.status_name).inc()
        _seconds.labels(call.method).observe(time.perf_counter() - begin)


@asynccontextmanager
async def log_call(call: Call) -> AsyncIterator[None]:
    """Log how the call ended; successes only at debug level."""
    begin = time.perf_counter()
    try:
        yield
    finally:
        write = _log.debug if call.status_name == 'OK' else _log.info
        write(
            'call',
            method=call.method,
            status=call.status_name,
            milliseconds=round(1000 * (time.perf_counter() - begin), 2),
            request_id=call.request_id,
            tenant=call.caller.tenant_id if call.caller else '',
        )


@asynccontextmanager
async def map_errors(call: Call) -> AsyncIterator[None]:
    """Turn whatever is raised inside into a status; what we did not foresee becomes INTERNAL."""
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
        # A task group wraps what its tasks raise; callers want the fact inside.
        group = cast('BaseExceptionGroup[BaseException]', error)
        return _domain_error(group.exceptions[0], call)
    if isinstance(error, Internal) and not error.request_id:
        # Of a defect that was met, and logged, further in.
        return Internal(call.request_id)
    if isinstance(error, DomainError):
        return error
    _log.error('unforeseen error', method=call.method, request_id=call.request_id, exc_info=error)
    return Internal(call.request_id)


async def _abort(call: Call, error: DomainError) -> None:
    call.status_name = error.code.name
    status = rpc_status.to_status(status_from_error(error))
    # Aborting replaces the trailing metadata set before, so the request id is named again.
    trailing = (*status.trailing_metadata, (REQUEST_ID_KEY, call.request_id))
    await call.context.abort(status.code, status.details, trailing)


def trust_peer(trusts: Callable[[Call], bool]) -> Layer:
    """Make the layer that refuses calls over connections of others than those who may call."""

    @asynccontextmanager
    async def trust(call: Call) -> AsyncIterator[None]:
        if not trusts(call):
            _log.warning('refused an untrusted peer', method=call.method, names=sorted(call.peer_names()))
            raise PeerNotTrusted()
        yield

    return trust


def authenticate_with(authenticator: Authenticator) -> Layer:
    """Make the layer that finds the caller."""

    @asynccontextmanager
    async def authenticate(call: Call) -> AsyncIterator[None]:
        call.caller = await authenticator.authenticate(call.method, call.metadata)
        set_caller(call.caller)
        yield

    return authenticate


def share_calls(call_limit: int) -> Layer:
    """Make the layer that keeps calls free for other tenants, however many streams one of them holds open.

    A tenant may have as many as are free: alone half of all, two of them a third each. Calls between services are
    for tenants already counted where they came in, and are not refused.
    """
    counts: Counter[str] = Counter()

    @asynccontextmanager
    async def share(call: Call) -> AsyncIterator[None]:
        caller = call.caller
        if caller is None or caller.is_internal:
            yield
            return
        own, free = counts[caller.tenant_id], call_limit - counts.total()
        if own >= free:
            raise QueueFull(queue_length=own, queue_limit=free)
        counts[caller.tenant_id] += 1
        try:
            yield
        finally:
            counts[caller.tenant_id] -= 1
            if not counts[caller.tenant_id]:
                del counts[caller.tenant_id]

    return share


def count_bytes(gate: ByteGate) -> Layer:
    """Make the layer, the innermost, that bounds the bytes of messages that are served, of each tenant and of all.

    Those of calls between services are counted where they came in.
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
    """Make the layer that answers for methods that are in the contract only."""

    @asynccontextmanager
    async def refuse_unbuilt_method(call: Call) -> AsyncIterator[None]:
        if not is_supported(call.method):
            raise NotBuiltYet(call.method[1:])
        yield

    return refuse_unbuilt_method


def bound_call(default_timeouts: Mapping[str, float], message_limit_bytes: int) -> Layer:
    """Make the layer that bounds a call's messages and, where the caller does not, its time."""

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
