"""Forwards calls to the services behind the gateway without parsing their bytes.

Each direction buffers at most one message and reads the next one after writing it, so back-pressure reaches the sender
and memory stays bounded. Deadlines and cancellation reach the service. The service's status is returned unchanged; an
error of the transport is converted. The request id is added to the trailing metadata if it is missing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor

from twinkle_services.gateway.credentials import Access, requirement_of
from twinkle_services.kit.errors import DomainError, ServiceUnreachable
from twinkle_services.kit.rpc.call import Context, cancelled_if_disconnected
from twinkle_services.kit.rpc.channel import forwarded_metadata
from twinkle_services.kit.rpc.context import current_request_id
from twinkle_services.kit.rpc.layers import REQUEST_ID_KEY
from twinkle_services.kit.rpc.status import error_from_call

Metadata = tuple[tuple[str, str | bytes], ...]

STATUS_DETAILS_KEY = 'grpc-status-details-bin'
_SETTLE_SECONDS = 0.005
"""Delay between the end of a client's stream and closing the stream to the service. grpc.aio 1.85 ends the stream of a
disconnected client like a finished stream, and cancels the call shortly after. Without the delay, the service would
treat a disconnected client as a finished one. Delete this constant once grpc.aio distinguishes the two."""


class Forwarder:
    """Handles those methods of `contracts` that clients may call, by calling the service behind the gateway.

    Contracts and channels are keyed by service. A call to a service without a channel is refused as unreachable.
    """

    def __init__(
        self,
        contracts: Mapping[str, Sequence[ServiceDescriptor]],
        *,
        channels: Mapping[str, grpc.aio.Channel],
        internal_token: str,
    ) -> None:
        self._outgoing = partial(forwarded_metadata, internal_token)
        self.handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
        """Handlers of the methods by full name with a leading slash."""
        for service, descriptors in contracts.items():
            for method in (method for descriptor in descriptors for method in descriptor.methods):
                name = f'{method.containing_service.full_name}/{method.name}'
                if requirement_of(name) is not Access.INTERNAL:
                    self.handlers[f'/{name}'] = self._handler(method, service, channels.get(service))

    def _handler(
        self, method: MethodDescriptor, service: str, channel: grpc.aio.Channel | None
    ) -> grpc.RpcMethodHandler[Any, Any]:
        if channel is None:
            return grpc.stream_stream_rpc_method_handler(_unreachable(service))
        path = f'/{method.containing_service.full_name}/{method.name}'
        match (method.client_streaming, method.server_streaming):
            case (False, False):
                return grpc.unary_unary_rpc_method_handler(self._unary_unary(channel.unary_unary(path), service))
            case (False, True):
                return grpc.unary_stream_rpc_method_handler(self._unary_stream(channel.unary_stream(path), service))
            case (True, False):
                return grpc.stream_unary_rpc_method_handler(self._stream_unary(channel.stream_unary(path), service))
            case _:
                return grpc.stream_stream_rpc_method_handler(self._stream_stream(channel.stream_stream(path), service))

    def _unary_unary(self, method: Any, service: str) -> Callable[[bytes, Context], Awaitable[bytes]]:
        async def forward(request: bytes, context: Context) -> bytes:
            call = method(request, timeout=context.time_remaining(), metadata=self._outgoing())
            try:
                response: bytes = await call
                _set_trailing(context, await call.trailing_metadata())
            except grpc.aio.AioRpcError as error:
                await _fail(error, context, service=service)
                raise
            return response

        return forward

    def _unary_stream(self, method: Any, service: str) -> Callable[[bytes, Context], AsyncGenerator[bytes, None]]:
        async def forward(request: bytes, context: Context) -> AsyncGenerator[bytes, None]:
            call = method(request, timeout=context.time_remaining(), metadata=self._outgoing())
            try:
                async for response in call:
                    yield response
                _set_trailing(context, await call.trailing_metadata())
            except grpc.aio.AioRpcError as error:
                await _fail(error, context, service=service)
            finally:
                call.cancel()

        return forward

    def _stream_unary(self, method: Any, service: str) -> Callable[[AsyncIterator[bytes], Context], Awaitable[bytes]]:
        async def forward(requests: AsyncIterator[bytes], context: Context) -> bytes:
            call = method(timeout=context.time_remaining(), metadata=self._outgoing())
            try:
                async with _sending(requests, call):
                    response: bytes = await call
                _set_trailing(context, await call.trailing_metadata())
            except grpc.aio.AioRpcError as error:
                await _fail(error, context, service=service)
                raise
            return response

        return forward

    def _stream_stream(
        self, method: Any, service: str
    ) -> Callable[[AsyncIterator[bytes], Context], AsyncGenerator[bytes, None]]:
        async def forward(requests: AsyncIterator[bytes], context: Context) -> AsyncGenerator[bytes, None]:
            call = method(timeout=context.time_remaining(), metadata=self._outgoing())
            try:
                async with _sending(requests, call):
                    async for response in call:
                        yield response
                    _set_trailing(context, await call.trailing_metadata())
            except grpc.aio.AioRpcError as error:
                await _fail(error, context, service=service)

        return forward


@asynccontextmanager
async def _sending(requests: AsyncIterator[bytes], call: Any) -> AsyncIterator[None]:
    """Write `requests` to `call` while the block runs; at its end, stop writing and cancel the call.

    Raises:
        DomainError: a request was refused, so the call was cancelled.
    """
    sender = asyncio.create_task(_send(requests, call))
    try:
        yield
    except (asyncio.CancelledError, grpc.aio.AioRpcError):
        if sender.done() and not sender.cancelled() and sender.exception() is not None:
            await sender
        raise
    finally:
        sender.cancel()
        call.cancel()
        await asyncio.gather(sender, return_exceptions=True)


async def _send(requests: AsyncIterator[bytes], call: Any) -> None:
    try:
        async for request in requests:
            await call.write(request)
        await asyncio.sleep(_SETTLE_SECONDS)
        await call.done_writing()
    except (grpc.aio.AioRpcError, grpc.aio.InternalError, asyncio.InvalidStateError):
        # The service ended the call first, and the reader of its responses receives the status.
        # The state of grpc.aio 1.85 at that moment decides which of the three errors is raised.
        return
    except DomainError:
        call.cancel()
        raise


def _set_trailing(context: Context, metadata: Any) -> None:
    context.set_trailing_metadata(_with_request_id((key, value) for key, value in metadata if key[:5] != 'grpc-'))


def _with_request_id(pairs: Any) -> Metadata:
    metadata: Metadata = tuple(pairs)
    if any(key == REQUEST_ID_KEY for key, _ in metadata):
        return metadata
    return (*metadata, (REQUEST_ID_KEY, current_request_id()))


async def _fail(error: grpc.aio.AioRpcError, context: Context, *, service: str) -> None:
    """End the call with the service's status. A status without details comes from the transport and is replaced."""
    trailing: Any = error.trailing_metadata()
    if trailing is None or STATUS_DETAILS_KEY not in trailing:
        raise error_from_call(error, service=service) from error
    pairs = ((key, value) for key, value in trailing if key == STATUS_DETAILS_KEY or key[:5] != 'grpc-')
    with cancelled_if_disconnected():
        await context.abort(error.code(), error.details() or '', _with_request_id(pairs))


def _unreachable(service: str) -> Callable[[Any, Context], AsyncGenerator[bytes, None]]:
    async def refuse(requests: Any, context: Context) -> AsyncGenerator[bytes, None]:
        del requests, context
        for _ in ():
            yield b''
        raise ServiceUnreachable(service)

    return refuse
