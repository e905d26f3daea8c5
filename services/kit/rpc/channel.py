"""Channels between services.

Calls over a channel of `open_channel` send the caller's identity and the trace, and are retried as the service config
of the contracts determines for each method. Channels for forwarded calls add no metadata and never retry.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from typing import Any

import grpc
from opentelemetry import propagate, trace

from twinkle_services.kit.errors import ServiceUnreachable
from twinkle_services.kit.rpc import auth
from twinkle_services.kit.rpc.context import current_caller, current_caller_or_none, current_request_id
from twinkle_services.kit.rpc.layers import REQUEST_ID_KEY, current_trace_metadata
from twinkle_services.kit.rpc.renewal import RenewingChannel
from twinkle_services.kit.rpc.status import error_from_call
from twinkle_services.kit.tls import TlsConfig, shared_files

_tracer = trace.get_tracer('twinkle.rpc')

TRANSPORT_OPTIONS: tuple[tuple[str, int], ...] = (
    # Sizes are checked by the service, whose error states the limit.
    ('grpc.max_receive_message_length', -1),
    ('grpc.max_send_message_length', -1),
    ('grpc.keepalive_time_ms', 30_000),
    ('grpc.keepalive_timeout_ms', 10_000),
    # Reconnect to a restarted service within a second; the default of gRPC is two minutes.
    ('grpc.initial_reconnect_backoff_ms', 100),
    ('grpc.min_reconnect_backoff_ms', 100),
    ('grpc.max_reconnect_backoff_ms', 1000),
)
FORWARDING_OPTIONS: tuple[tuple[str, int], ...] = (
    *TRANSPORT_OPTIONS,
    # Clients of the gateway retry; retries here would multiply the clients' retries.
    ('grpc.enable_retries', 0),
)
"""Options of channels that forward calls."""
_PLAINTEXT = TlsConfig()


def service_config_json() -> str:
    """Return the gRPC service config of the contracts, with deadlines and retries by method."""
    return resources.files('twinkle.api').joinpath('service_config.json').read_text(encoding='utf-8')


def open_channel(
    address: str,
    *,
    internal_token: str = '',
    tls: TlsConfig = _PLAINTEXT,
    service: str = '',
    message_bytes: int = -1,
) -> grpc.aio.Channel:
    """Open a channel to another service of this deployment.

    Each call sends the internal token and the current trace, request id and caller (`current_caller` or `acting_for`),
    and records a client span.

    Args:
        address: Address as `host:port`.
        internal_token: Secret that the services of the deployment share.
        tls: TLS settings of this service; the connection uses TLS if they name authorities.
        service: Name of the called service, used to look up the expected name in its certificate.
        message_bytes: Maximum size of a received message; a larger message fails its call with RESOURCE_EXHAUSTED. -1
            for no limit.

    Returns:
        A channel that the caller closes. It connects lazily and reconnects automatically.
    """
    overrides = {'grpc.service_config': service_config_json(), 'grpc.max_receive_message_length': message_bytes}
    options: dict[str, Any] = {**dict(TRANSPORT_OPTIONS), **overrides}
    return _open(address, list(options.items()), _interceptors(internal_token), tls=tls, service=service)


def open_forwarding_channel(address: str, *, tls: TlsConfig = _PLAINTEXT, service: str = '') -> grpc.aio.Channel:
    """Open a channel that forwards calls, without interceptors and retries. The caller closes it.

    Args:
        address: Address as `host:port`.
        tls: See `open_channel`.
        service: See `open_channel`.
    """
    return _open(address, list(FORWARDING_OPTIONS), (), tls=tls, service=service)


def _open(
    address: str,
    options: list[tuple[str, Any]],
    interceptors: Sequence[grpc.aio.ClientInterceptor],
    *,
    tls: TlsConfig,
    service: str,
) -> grpc.aio.Channel:
    if tls.ca is None:
        return grpc.aio.insecure_channel(address, options=options, interceptors=interceptors)
    if name := tls.server_names.get(service):
        options.append(('grpc.ssl_target_name_override', name))

    def opened(credentials: grpc.ChannelCredentials) -> grpc.aio.Channel:
        return grpc.aio.secure_channel(address, credentials, options=options, interceptors=interceptors)

    return RenewingChannel(shared_files(tls), opened)


def identity_metadata(internal_token: str) -> list[tuple[str, str]]:
    """Return the metadata of a call by this service itself, with the current request id and caller if there are any."""
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


def forwarded_metadata(internal_token: str, *, is_internal: bool = False) -> tuple[tuple[str, str], ...]:
    """Return the metadata of a forwarded call: the authenticated caller, the request id and the trace.

    Other metadata of the client is not forwarded.

    Args:
        internal_token: Token that makes the receiving service trust the identity.
        is_internal: Whether a service of this deployment makes the call on behalf of the caller.

    Raises:
        CredentialsMissing: There is no current caller.
    """
    caller = current_caller()
    return (
        *((('authorization', f'Bearer {internal_token}'),) if internal_token else ()),
        *(((auth.INTERNAL_KEY, '1'),) if is_internal else ()),
        (auth.TENANT_KEY, caller.tenant_id),
        (auth.KEY_ID_KEY, caller.key_id),
        (auth.SCOPES_KEY, ','.join(sorted(caller.scopes))),
        (REQUEST_ID_KEY, current_request_id()),
        *current_trace_metadata().items(),
    )


@contextmanager
def call_errors(service: str) -> Iterator[None]:
    """Convert the errors of calls that the block makes to another service.

    `service` is the name of the called service, for errors of the transport.

    Raises:
        DomainError: The error behind a failed call.
        ServiceUnreachable: The channel was closed, because the service left the deployment or this process stops.
    """
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise error_from_call(error, service=service) from error
    except grpc.aio.UsageError as error:
        raise ServiceUnreachable(service) from error


class _CallInterceptor:
    """Adds identity and trace to outgoing calls, and closes their spans."""

    def __init__(self, internal_token: str) -> None:
        self._internal_token = internal_token

    async def start(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        method: str = details.method.decode() if isinstance(details.method, bytes) else details.method
        attributes = {'rpc.system.name': 'grpc', 'rpc.method': method[1:]}
        span = _tracer.start_span(method[1:], kind=trace.SpanKind.CLIENT, attributes=attributes)
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
"""References to the tasks that close spans, so that they are not garbage collected."""


async def _end_span(span: trace.Span, call: Any) -> None:
    try:
        code = await call.code()
        span.set_attribute('rpc.response.status_code', code.name)
        if code is not grpc.StatusCode.OK:
            span.set_attribute('error.type', code.name)
            span.set_status(trace.StatusCode.ERROR, code.name)
    finally:
        span.end()


class _UnaryUnary(_CallInterceptor, grpc.aio.UnaryUnaryClientInterceptor):
    async def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await self.start(continuation, client_call_details, request)


class _UnaryStream(_CallInterceptor, grpc.aio.UnaryStreamClientInterceptor):
    async def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await self.start(continuation, client_call_details, request)


class _StreamUnary(_CallInterceptor, grpc.aio.StreamUnaryClientInterceptor):
    async def intercept_stream_unary(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        return await self.start(continuation, client_call_details, request_iterator)


class _StreamStream(_CallInterceptor, grpc.aio.StreamStreamClientInterceptor):
    async def intercept_stream_stream(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        return await self.start(continuation, client_call_details, request_iterator)


def _interceptors(internal_token: str) -> Sequence[grpc.aio.ClientInterceptor]:
    # grpc.aio uses each interceptor object for one call type only.
    return [kind(internal_token) for kind in (_UnaryUnary, _UnaryStream, _StreamUnary, _StreamStream)]
