"""Channels from one service to another: retries from data, identity and trace on every call."""

import asyncio
from collections.abc import Callable, Sequence
from importlib import resources
from typing import Any

import grpc
from opentelemetry import propagate, trace

from services.kit.rpc import auth
from services.kit.rpc.context import current_caller_or_none, current_request_id
from services.kit.rpc.layers import REQUEST_ID_KEY

_tracer = trace.get_tracer('twinkle.rpc')

TRANSPORT_OPTIONS: tuple[tuple[str, int], ...] = (
    # Sizes are checked by the service, which can say what the limit is.
    ('grpc.max_receive_message_length', -1),
    ('grpc.max_send_message_length', -1),
    ('grpc.keepalive_time_ms', 30_000),
    ('grpc.keepalive_timeout_ms', 10_000),
)


def service_config_json() -> str:
    """Return the gRPC service config that ships with the stubs: deadlines and retries by method."""
    return resources.files('twinkle.api').joinpath('service_config.json').read_text(encoding='utf-8')


def open_channel(address: str, *, internal_token: str = '') -> grpc.aio.Channel:
    """Open a channel to another service of this deployment.

    Every call carries the internal token, the current trace, request id and caller (`current_caller`
    or `acting_for`), and makes a client span.

    Args:
        address: 'host:port'.
        internal_token: the deployment's shared secret.

    Returns:
        A channel to be closed by the caller. It connects lazily and reconnects by itself.
    """
    return grpc.aio.insecure_channel(
        address,
        options=[*TRANSPORT_OPTIONS, ('grpc.service_config', service_config_json())],
        interceptors=_interceptors(internal_token),
    )


def identity_metadata(internal_token: str) -> list[tuple[str, str]]:
    """Return the metadata of a call that this service makes by itself, for the current caller if any."""
    metadata = [(auth.INTERNAL_KEY, '1')]
    if internal_token:
        metadata.append(('authorization', f'Bearer {internal_token}'))
    if request_id := current_request_id():
        metadata.append((REQUEST_ID_KEY, request_id))
    caller = current_caller_or_none()
    if caller is not None:
        metadata.append((auth.TENANT_KEY, caller.tenant_id))
        metadata.append((auth.KEY_ID_KEY, caller.key_id))
        metadata.append((auth.SCOPES_KEY, ','.join(sorted(caller.scopes))))
    return metadata


class _Outgoing:
    """Adds identity and trace to a call and ends its span when the call ends."""

    def __init__(self, internal_token: str) -> None:
        self._internal_token = internal_token

    async def start(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        method: str = details.method.decode() if isinstance(details.method, bytes) else details.method
        span = _tracer.start_span(method[1:], kind=trace.SpanKind.CLIENT)
        headers: dict[str, str] = {}
        propagate.inject(headers, context=trace.set_span_in_context(span))
        metadata = grpc.aio.Metadata(*(details.metadata or ()), *identity_metadata(self._internal_token))
        for key, value in headers.items():
            metadata.add(key, value)
        try:
            call = await continuation(details._replace(metadata=metadata), request)
        except BaseException:
            span.set_status(trace.StatusCode.ERROR)
            span.end()
            raise
        task = asyncio.ensure_future(_end_span(span, call))
        _span_tasks.add(task)
        task.add_done_callback(_span_tasks.discard)
        return call


_span_tasks: set[asyncio.Future[None]] = set()
"""Keeps the tasks that end spans from being collected before they are done."""


async def _end_span(span: trace.Span, call: Any) -> None:
    try:
        code = await call.code()
        span.set_attribute('rpc.status', code.name)
        if code is not grpc.StatusCode.OK:
            span.set_status(trace.StatusCode.ERROR, code.name)
    finally:
        span.end()


class _UnaryUnary(_Outgoing, grpc.aio.UnaryUnaryClientInterceptor):
    async def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await self.start(continuation, client_call_details, request)


class _UnaryStream(_Outgoing, grpc.aio.UnaryStreamClientInterceptor):
    async def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await self.start(continuation, client_call_details, request)


class _StreamUnary(_Outgoing, grpc.aio.StreamUnaryClientInterceptor):
    async def intercept_stream_unary(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        return await self.start(continuation, client_call_details, request_iterator)


class _StreamStream(_Outgoing, grpc.aio.StreamStreamClientInterceptor):
    async def intercept_stream_stream(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        return await self.start(continuation, client_call_details, request_iterator)


def _interceptors(internal_token: str) -> Sequence[grpc.aio.ClientInterceptor]:
    # grpc.aio looks at one shape for each interceptor object, so there are four.
    return [kind(internal_token) for kind in (_UnaryUnary, _UnaryStream, _StreamUnary, _StreamStream)]
