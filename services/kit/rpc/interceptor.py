"""Interceptor that runs all handlers inside the same layers, except the handlers of health and reflection."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import Any

import grpc
from grpc_status import rpc_status

from twinkle_services.kit.errors import NotBuiltYet, QueueFull
from twinkle_services.kit.rpc.call import Call, Context, Decoder, cancelled_if_disconnected
from twinkle_services.kit.rpc.layers import Layer
from twinkle_services.kit.rpc.status import status_from_error
from twinkle_services.kit.rpc.unread_requests import reading_rest, reading_rest_if_refused

_PUBLIC_PREFIXES = ('/grpc.health.', '/grpc.reflection.')
"""Prefixes of the health and reflection methods, which need no credentials and reveal nothing about tenants."""
MAX_OPEN_STREAMS = 128
"""Maximum number of concurrent streams of health, and of reflection, so that neither refuses streams of the other, and
most concurrent calls remain available to tenants."""


class LayeredInterceptor(grpc.aio.ServerInterceptor):
    """Runs each call inside the layers, with the first layer outermost."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._layers = tuple(layers)
        self._open_streams: Counter[str] = Counter()
        """Number of streams by the prefix of their method."""

    def replace(self, layers: Sequence[Layer]) -> None:
        """Run later calls inside other layers."""
        self._layers = tuple(layers)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Return the wrapped handler of the method; for an unknown method, a handler that refuses the call."""
        method: str = handler_call_details.method
        handler: Any = await continuation(handler_call_details)
        for prefix in _PUBLIC_PREFIXES:
            if method.startswith(prefix):
                return self._limited(prefix, handler)
        if handler is None:
            return grpc.stream_stream_rpc_method_handler(self._streaming(method, _refuse, None, is_known=False))
        return self._wrap(method, handler)

    def _limited(self, prefix: str, handler: Any) -> Any:
        """Limit the streams of the public methods with a prefix. Unary calls finish quickly and are not limited."""
        if handler is None or not handler.response_streaming:
            return handler
        behaviour = handler.stream_stream or handler.unary_stream

        async def serve(request: Any, context: Context) -> None:
            if self._open_streams[prefix] >= MAX_OPEN_STREAMS:
                refusal = QueueFull(queue_length=self._open_streams[prefix], queue_limit=MAX_OPEN_STREAMS)
                status = rpc_status.to_status(status_from_error(refusal))
                await context.abort(status.code, status.details, status.trailing_metadata)
            self._open_streams[prefix] += 1
            try:
                await _write_all(behaviour(request, context), context)
            finally:
                self._open_streams[prefix] -= 1

        wrap = grpc.stream_stream_rpc_method_handler if handler.stream_stream else grpc.unary_stream_rpc_method_handler
        return wrap(serve, handler.request_deserializer, handler.response_serializer)

    def _wrap(self, method: str, handler: Any) -> grpc.RpcMethodHandler[Any, Any]:
        # Requests are parsed inside the layers, so that parse errors are mapped and logged, too.
        decode, encode = handler.request_deserializer, handler.response_serializer
        if handler.unary_unary:
            serve = self._single(method, handler.unary_unary, decode)
            return grpc.unary_unary_rpc_method_handler(serve, response_serializer=encode)
        if handler.stream_unary:
            serve = self._single(method, handler.stream_unary, decode)
            return grpc.stream_unary_rpc_method_handler(serve, response_serializer=encode)
        if handler.unary_stream:
            serve = self._streaming(method, handler.unary_stream, decode)
            return grpc.unary_stream_rpc_method_handler(serve, response_serializer=encode)
        serve = self._streaming(method, handler.stream_stream, decode)
        return grpc.stream_stream_rpc_method_handler(serve, response_serializer=encode)

    def _single(self, method: str, behaviour: Callable[..., Awaitable[Any]], decode: Decoder | None) -> Any:
        async def serve(request: Any, context: Context) -> Any:
            call = Call.begin(method, context, decode=decode, is_stream=hasattr(request, '__aiter__'))
            async with self._around(call, request), reading_rest(request):
                return await behaviour(await call.received(request), context)

        return serve

    def _streaming(
        self, method: str, behaviour: Callable[..., Any], decode: Decoder | None, *, is_known: bool = True
    ) -> Any:
        # Responses are written here instead of yielded, so that a cancelled call is interrupted inside these scopes and
        # the generator is closed immediately.
        async def serve(request: Any, context: Context) -> None:
            call = Call.begin(method, context, decode=decode, is_known=is_known, is_stream=True)
            async with (
                self._around(call, request),
                reading_rest_if_refused(request),
                aclosing(behaviour(await call.received(request), context)) as responses,
            ):
                async for response in responses:
                    with cancelled_if_disconnected():
                        await context.write(response)
                    del response  # Otherwise, a silent stream would keep its last message.

        return serve

    @asynccontextmanager
    async def _around(self, call: Call, request: Any) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for layer in self._layers:
                await stack.enter_async_context(layer(call))
            await call.take(request)
            yield


async def _write_all(responses: Any, context: Context) -> None:
    """Write the responses of a generator, or await a coroutine that writes them itself."""
    if not hasattr(responses, '__aiter__'):
        await responses
        return
    async with aclosing(responses):
        async for response in responses:
            with cancelled_if_disconnected():
                await context.write(response)


class _NoResponses:
    """A response stream that raises NotBuiltYet."""

    async def __anext__(self) -> bytes:
        raise NotBuiltYet('the requested method')

    def __aiter__(self) -> _NoResponses:
        return self

    async def aclose(self) -> None:
        """Close the stream, which has no resources."""


def _refuse(request: Any, context: Context) -> _NoResponses:
    del request, context
    return _NoResponses()
