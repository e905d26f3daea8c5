"""Forwards calls to the services behind the gateway without parsing their bytes.

Each direction buffers at most one message and reads the next one after writing it, so back-pressure reaches the sender
and memory stays bounded. Deadlines and cancellation reach the service. The service's status is returned unchanged; an
error of the transport is converted. The request id is added to the trailing metadata if it is missing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from functools import partial
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor

from twinkle_services.kit.errors import DomainError, ServiceUnreachable
from twinkle_services.kit.rpc.call import Context, cancelled_if_disconnected
from twinkle_services.kit.rpc.channel import forwarded_metadata
from twinkle_services.kit.rpc.context import current_request_id
from twinkle_services.kit.rpc.layers import REQUEST_ID_KEY
from twinkle_services.kit.rpc.status import error_from_call

Metadata = tuple[tuple[str, str | bytes], ...]
Handler = Any
"""Handler of a method. The type stubs of gRPC do not cover its asyncio handlers."""
Request = Any
"""Bytes of a request, or the stream of requests of a method whose client streams."""
Admit = Callable[[Request, Context], AbstractAsyncContextManager[Request]]
"""Waits until a request may be forwarded, and yields the request to forward; the block lasts until the call ends."""
Route = Callable[[Request], Awaitable[tuple[str, Request]]]
"""Returns the name of the service for a request, and the request to forward."""

STATUS_DETAILS_KEY = 'grpc-status-details-bin'
_SETTLE_SECONDS = 0.005
"""Delay between the end of a client's stream and closing the stream to the service. grpc.aio 1.85 ends the stream of a
disconnected client like a finished stream, and cancels the call shortly after. Without the delay, the service would
treat a disconnected client as a finished one. Delete this constant once grpc.aio distinguishes the two."""


class ForwardedMethod:
    """Handles one method by calling a service behind the gateway.

    Args:
        method: the method in the contract.
        channels: channels without interceptors, by the names of the services that may serve the method. Without a
            channel, calls are refused as unreachable.
        kind: kind of these services in errors.
        internal_token: proves the gateway's identity to the services.
        admit: applies quotas to each call; None forwards every call immediately.
    """

    def __init__(
        self,
        method: MethodDescriptor,
        channels: Mapping[str, grpc.aio.Channel],
        *,
        kind: str,
        internal_token: str,
        admit: Admit | None = None,
    ) -> None:
        self.descriptor = method
        self._kind = kind
        self._internal_token = internal_token
        self._admit = admit
        sides = method.client_streaming, method.server_streaming
        self._shape = '_'.join('stream' if is_streaming else 'unary' for is_streaming in sides)
        path = f'/{method.containing_service.full_name}/{method.name}'
        self._calls = {name: getattr(channel, self._shape)(path) for name, channel in channels.items()}
        """The method at each service."""

    def handler(self, route: Route | None = None) -> Handler:
        """Return a handler that calls the service that `route` chooses; without a route, the only service."""
        serve = self._stream if self.descriptor.server_streaming else self._respond
        return getattr(grpc, f'{self._shape}_rpc_method_handler')(partial(serve, route))

    async def call_at(self, service: str, request: bytes, context: Context) -> bytes:
        """Call a service with one request, and return its only response."""
        async with self._calling(service, request, context) as call:
            return await call

    async def _respond(self, route: Route | None, request: Request, context: Context) -> bytes:
        async with self._routed(route, request, context) as call:
            return await call

    async def _stream(self, route: Route | None, request: Request, context: Context) -> AsyncGenerator[bytes, None]:
        async with self._routed(route, request, context) as call:
            async for response in call:
                yield response

    @asynccontextmanager
    async def _routed(self, route: Route | None, request: Request, context: Context) -> AsyncIterator[Any]:
        """Admit a request, and call the service that it belongs to; see `_calling`."""
        if not self._calls:
            raise ServiceUnreachable(self._kind)
        async with nullcontext(request) if self._admit is None else self._admit(request, context) as admitted:
            service, outgoing = (next(iter(self._calls)), admitted) if route is None else await route(admitted)
            async with self._calling(service, outgoing, context) as call:
                yield call

    @asynccontextmanager
    async def _calling(self, service: str, request: Request, context: Context) -> AsyncIterator[Any]:
        """Call a service, and yield the call; the block reads all responses. A failure also ends the client's call."""
        is_unary = isinstance(request, bytes)
        arguments = (request,) if is_unary else ()
        metadata = forwarded_metadata(self._internal_token)
        call = self._calls[service](*arguments, timeout=context.time_remaining(), metadata=metadata)
        try:
            async with nullcontext() if is_unary else _sending(request, call):
                yield call
                trailing = await call.trailing_metadata()
                context.set_trailing_metadata(_with_request_id(pair for pair in trailing if pair[0][:5] != 'grpc-'))
        except grpc.aio.AioRpcError as error:
            await _fail(error, context, service=self._kind)
            raise
        finally:
            call.cancel()


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
