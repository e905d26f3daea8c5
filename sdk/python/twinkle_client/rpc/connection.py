"""A gRPC channel to a gateway, with a method for each of the four kinds of calls.

Every call sends the API key, a request id that all its attempts share, and the trace context of a client span.
Failures are raised as `twinkle_client.errors`. Retryable failures of unary calls, and of response streams before their
first response, are retried until `retry_timeout` has passed. `resumed_stream` also opens a stream of responses again.
Callers resume all other streams.
"""

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from importlib import resources
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message
from opentelemetry import propagate, trace

from twinkle.api.server.v1 import server_service_pb2
from twinkle.api.server.v1.server_service_pb2_grpc import ServerServiceStub
from twinkle_client.errors import Error, ErrorFacts, RetryableError, UsageError, error_from_rpc
from twinkle_client.rpc.address import Address
from twinkle_client.rpc.loop import LoopThread
from twinkle_client.rpc.retry import Backoff, Outages, Silence
from twinkle_client.rpc.trust import diagnose_connection, read_authorities
from twinkle_client.tracing import export_from_environment

_Request = TypeVar('_Request', bound=Message)
_Response = TypeVar('_Response')

_QUESTION_TIMEOUT = timedelta(seconds=5)
"""Timeout of `GetServerInfo`, which reports the services that respond to the gateway."""
DEFAULT_RETRY_TIMEOUT = timedelta(seconds=120)
"""Enough time for a service to restart and restore its state."""
_TRANSPORT_OPTIONS: tuple[tuple[str, int], ...] = (
    # The services limit the message sizes, and their error messages name the limit.
    ('grpc.max_receive_message_length', -1),
    ('grpc.max_send_message_length', -1),
    ('grpc.keepalive_time_ms', 30_000),
    ('grpc.keepalive_timeout_ms', 10_000),
    # `Backoff` retries all calls. Retries by grpc would hide an outage from `Backoff` for three seconds.
    ('grpc.enable_retries', 0),
)
_tracer = trace.get_tracer('twinkle.client')


def new_id(prefix: str) -> str:
    """Return a random id that begins with `prefix` and a dash. The id makes a resent request idempotent."""
    return f'{prefix}-{uuid.uuid4().hex}'


@dataclass
class _CallContext:
    """The request id and the span of a call, which all its attempts share."""

    span: trace.Span
    request_id: str = field(default_factory=lambda: new_id('rq'))

    def metadata(self, api_key: str) -> grpc.aio.Metadata:
        """Return the metadata of an attempt."""
        headers = {'x-request-id': self.request_id}
        if api_key:
            headers['authorization'] = f'Bearer {api_key}'
        propagate.inject(headers, context=trace.set_span_in_context(self.span))
        return grpc.aio.Metadata(*headers.items())

    def to_error(self, error: grpc.aio.AioRpcError) -> Error:
        """Convert an error of grpc, and record its status on the span."""
        self.span.set_attributes({'rpc.response.status_code': error.code().name, 'error.type': error.code().name})
        return error_from_rpc(error, request_id=self.request_id)


class Connection:
    """A channel with its credentials and event loop.

    The first call connects, and later calls reconnect after a loss.

    Args:
        address: Address of the gateway.
        api_key: Empty for a server without authentication.
        retry_timeout: Time for which calls are retried while the server is unavailable.
        ca: Path of a PEM file of CA certificates that verify a server with TLS. Empty: the system's certificates.

    Raises:
        ValueError: The server uses TLS, and the file `ca` cannot be read or contains no certificate.
    """

    def __init__(
        self, address: Address, *, api_key: str, retry_timeout: timedelta = DEFAULT_RETRY_TIMEOUT, ca: str = ''
    ) -> None:
        export_from_environment()
        self._authorities = read_authorities(ca) if address.is_secure else None
        self._has_connected = False
        self.address = address
        self.loop_thread = LoopThread()
        self._api_key = api_key
        self._retry_timeout = retry_timeout.total_seconds()
        self._outages = Outages(address.target)
        self._silence = Silence(self._unreachable_services, self._outages)
        self.channel = self.loop_thread.run(self._open())

    async def _open(self) -> grpc.aio.Channel:
        options = [*_TRANSPORT_OPTIONS, ('grpc.service_config', _service_config())]
        if self.address.is_secure:
            credentials = grpc.ssl_channel_credentials(self._authorities)
            return grpc.aio.secure_channel(self.address.target, credentials, options=options)
        return grpc.aio.insecure_channel(self.address.target, options=options)

    async def unary(
        self,
        call: grpc.aio.UnaryUnaryMultiCallable[_Request, _Response],
        request: _Request,
        *,
        deadline: timedelta | None = None,
    ) -> _Response:
        """Send a request and return the response.

        Args:
            call: Method of a stub.
            request: Message to send. It may be sent more than once; an id in the message makes repetitions idempotent.
            deadline: Deadline of one attempt. Unset: the timeout in the service config.

        Raises:
            Error: See `twinkle_client.errors`.
        """
        seconds = None if deadline is None else deadline.total_seconds()
        with _client_span(type(request)) as context, self.backoff() as backoff:
            while True:
                try:
                    response = await call(request, metadata=context.metadata(self._api_key), timeout=seconds)
                except grpc.aio.AioRpcError as error:
                    await backoff.wait_or_raise(await self._explained(context.to_error(error)))
                else:
                    self._has_connected = True
                    return response

    async def stream(
        self, call: grpc.aio.UnaryStreamMultiCallable[_Request, _Response], request: _Request, *, service: str = ''
    ) -> AsyncGenerator[_Response]:
        """Send a request and yield the responses. The request is retried only until the first response arrives.

        Args:
            call: Method of a stub.
            request: Message to send. It may be sent more than once.
            service: Service that is reported if it is unavailable while the stream is silent. Empty: nothing is
                reported; use this for streams that are usually silent.

        Raises:
            Error: See `twinkle_client.errors`.
        """
        with (
            _client_span(type(request)) as context,
            self.backoff() as backoff,
            self._silence.watched(service) as record_message,
        ):
            while True:
                has_begun = False
                responses = call(request, metadata=context.metadata(self._api_key))
                try:
                    async for response in responses:
                        has_begun = self._has_connected = True
                        backoff.reset()
                        record_message()
                        yield response
                        record_message()
                    return
                except grpc.aio.AioRpcError as error:
                    if has_begun:
                        raise context.to_error(error) from None
                    await backoff.wait_or_raise(await self._explained(context.to_error(error)))
                finally:
                    responses.cancel()

    async def resumed_stream(
        self,
        call: grpc.aio.UnaryStreamMultiCallable[_Request, _Response],
        request: _Request,
        *,
        resume_after: Callable[[_Response], None],
    ) -> AsyncGenerator[_Response]:
        """Yield the responses of `stream`, and open the stream again after a lost connection.

        Args:
            call: Method of a stub.
            request: Message to send.
            resume_after: Changes the request so that the next stream begins after a response.

        Raises:
            Error: See `twinkle_client.errors`. A RetryableError is raised only if there was no response since the
                stream was opened, because `stream` has then retried until its timeout.
        """
        while True:
            has_progressed = False
            try:
                async with aclosing(self.stream(call, request)) as responses:
                    async for response in responses:
                        has_progressed = True
                        resume_after(response)
                        yield response
                return
            except RetryableError:
                if not has_progressed:
                    raise

    async def upload(
        self,
        call: grpc.aio.StreamUnaryMultiCallable[_Request, _Response],
        requests: AsyncIterator[_Request],
        *,
        request_type: type[_Request],
    ) -> _Response:
        """Send a stream and return the response; the caller resumes a broken stream.

        Raises:
            Error: See `twinkle_client.errors`.
        """
        with _client_span(request_type) as context:
            try:
                return await call(requests, metadata=context.metadata(self._api_key))
            except grpc.aio.AioRpcError as error:
                raise await self._explained(context.to_error(error)) from None

    async def duplex(
        self,
        call: grpc.aio.StreamStreamMultiCallable[_Request, _Response],
        requests: AsyncGenerator[_Request],
        *,
        request_type: type[_Request],
    ) -> AsyncGenerator[_Response]:
        """Send a stream and yield the responses; the caller resumes a broken stream.

        `requests` is not read after the stream has ended.

        Raises:
            Error: See `twinkle_client.errors`.
        """
        with _client_span(request_type) as context:
            responses = call(metadata=context.metadata(self._api_key))
            sending = asyncio.create_task(_send(requests, responses))
            try:
                async for response in responses:
                    yield response
            except grpc.aio.AioRpcError as error:
                raise await self._explained(context.to_error(error)) from None
            finally:
                sending.cancel()
                responses.cancel()
                await asyncio.gather(sending, return_exceptions=True)

    async def _explained(self, error: Error) -> Error:
        """Return `error`, or a `UsageError` if the address or the CA certificates make a connection impossible."""
        if error.reason or self._has_connected or not isinstance(error, RetryableError):
            self._has_connected |= bool(error.reason)
            return error
        problem = await diagnose_connection(self.address, self._authorities)
        if not problem:
            return error
        return UsageError(ErrorFacts(code=error.code, message=problem, request_id=error.request_id))

    async def _unreachable_services(self) -> frozenset[str]:
        """Return the services that do not respond to the gateway; empty if the gateway itself does not respond."""
        metadata, seconds = _CallContext(trace.INVALID_SPAN).metadata(self._api_key), _QUESTION_TIMEOUT.total_seconds()
        call = ServerServiceStub(self.channel).GetServerInfo
        with suppress(grpc.aio.AioRpcError):
            info = await call(server_service_pb2.GetServerInfoRequest(), metadata=metadata, timeout=seconds)
            return frozenset(item.service for item in info.services if not item.is_reachable)
        return frozenset()

    def close(self) -> None:
        """Close the channel and cancel running calls; closing again does nothing."""
        try:
            self.loop_thread.run(self._close_channel())
        except RuntimeError:
            return
        self.loop_thread.stop()

    async def _close_channel(self) -> None:
        await self.channel.close()

    def backoff(self) -> Backoff:
        """Return a new backoff of `retry_timeout`, for a coroutine that handles its own retries."""
        return Backoff(self._retry_timeout, self._outages)


async def _send(requests: AsyncGenerator[Any], call: Any) -> None:
    """Write all requests to a call.

    If grpc read the requests itself, it would continue after the end of the call, and lose the next request.
    """
    try:
        async with aclosing(requests):
            async for request in requests:
                await call.write(request)
        await call.done_writing()
    except (grpc.aio.AioRpcError, grpc.aio.InternalError, asyncio.InvalidStateError):
        # The call has ended, and the reader of its responses receives the status.
        return
    except Exception:
        call.cancel()
        raise


@contextmanager
def _client_span(request_type: type[Message]) -> Iterator[_CallContext]:
    # The span is not made current, because a generator's body runs in the context that requests the next item.
    method = _full_method(request_type)
    attributes = {'rpc.system.name': 'grpc', 'rpc.method': method}
    span = _tracer.start_span(method, kind=trace.SpanKind.CLIENT, attributes=attributes)
    try:
        yield _CallContext(span)
    except Error as error:
        span.set_status(trace.StatusCode.ERROR, error.reason or error.code.name)
        raise
    finally:
        span.end()


@cache
def _full_method(request_type: type[Message]) -> str:
    """Return 'package.Service/Method' of a request type; each method has a different request type."""
    descriptor: Any = request_type.DESCRIPTOR
    for service in descriptor.file.services_by_name.values():
        for method in service.methods:
            if method.input_type is descriptor:
                return f'{service.full_name}/{method.name}'
    raise ValueError(f'{descriptor.full_name} is not the request type of any method')


@cache
def _service_config() -> str:
    return resources.files('twinkle.api').joinpath('service_config.json').read_text(encoding='utf-8')
