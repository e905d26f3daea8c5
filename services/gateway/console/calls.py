"""Forwards gRPC-Web calls to the gateway's own gRPC server, without parsing their messages.

Each call passes through all interceptors of the server. Its metadata consists of the verified key, the request id and
the trace; no other header of the browser is forwarded, so a browser cannot set an identity. A call reads the next
message only after the browser's connection has accepted the previous one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf import descriptor_pool
from grpc_status import rpc_status

from twinkle_services.gateway.console.frames import (
    HEAD_BYTES,
    WEB_TYPE,
    check_web_call,
    is_web_call,
    message_frame,
    message_in,
    timeout_seconds,
    trailers_frame,
)
from twinkle_services.gateway.console.sessions import BrowserSessions, check_origin
from twinkle_services.gateway.credentials import Access, requirement_of
from twinkle_services.gateway.http.body import read_bytes
from twinkle_services.gateway.http.call import ErrorFormat, HttpCall, JsonResponse, Response
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.errors import DomainError, NotBuiltYet, ScopeMissing
from twinkle_services.kit.rpc.layers import REQUEST_ID_KEY, current_trace_metadata
from twinkle_services.kit.rpc.status import error_from_call, status_from_error

_HEADERS = {'cache-control': 'no-store', 'x-accel-buffering': 'no', 'x-content-type-options': 'nosniff'}
_DETAILS_KEY = 'grpc-status-details-bin'
_TRACE_KEY = 'traceparent'


class WebCalls:
    """Serves the methods of the gRPC server that have one request message."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        methods: Mapping[str, bool],
        sessions: BrowserSessions,
        *,
        body_bytes: int,
        errors: ErrorFormat,
    ) -> None:
        """Serve calls over a channel to the gateway's gRPC server.

        Args:
            channel: Channel without credentials and retries.
            methods: Whether the server implements each method ('package.Service/Method').
            sessions: Sessions of browsers.
            body_bytes: Maximum bytes of a request's body.
            errors: Format of errors for requests that are not gRPC-Web.
        """
        self._channel: Any = channel
        self._methods = methods
        self._sessions = sessions
        self._body_bytes = body_bytes
        self._errors = errors

    async def identify(self, call: HttpCall) -> Caller:
        """Return the caller of the request's key. The key is also checked at intervals while the call runs.

        Raises:
            CredentialsMissing, CredentialsInvalid: there is no valid key.
            InvalidField: the request may come from a page of another site, or is not gRPC-Web.
        """
        caller = await self._sessions.caller_of(call.headers)
        check_origin(call.headers)
        check_web_call(call.headers)
        return caller

    async def serve(self, call: HttpCall) -> Response:
        """Return the response of a call. The call starts when the response is written.

        Raises:
            NotBuiltYet: the method is unknown, or has a stream of requests.
            ScopeMissing: only services may call the method.
        """
        method = f'{call.path_values["service"]}/{call.path_values["method"]}'
        self._check_method(method)
        seconds = timeout_seconds(call.headers)
        request = message_in(await read_bytes(call, limit_bytes=self._body_bytes + HEAD_BYTES))
        secret = self._sessions.credential_of(call.headers).secret
        trace = current_trace_metadata().get(_TRACE_KEY)
        metadata = (
            ('authorization', f'Bearer {secret}'),
            (REQUEST_ID_KEY, call.request_id),
            *(((_TRACE_KEY, trace),) if trace else ()),
        )
        # A unary method is called like a stream with one response; the bytes on the wire are the same.
        stub = self._channel.unary_stream(f'/{method}')
        return _WebResponse(stub, request, metadata, seconds)

    async def write_error(self, call: HttpCall, error: DomainError) -> None:
        """Write an error as a status of gRPC, or as JSON if the request is not gRPC-Web."""
        if not call.status and not is_web_call(call.headers):
            body = self._errors.body_of(error, request_id=call.request_id)
            await JsonResponse(body, self._errors.status_of(error)).write(call)
            return
        if not call.status:
            await call.begin(200, WEB_TYPE, _HEADERS)
        await call.write(_error_frame(error, call.request_id), is_last=True)

    def _check_method(self, method: str) -> None:
        if not self._methods.get(method, False):
            raise NotBuiltYet(method[:200])
        if requirement_of(method) is Access.INTERNAL:
            raise ScopeMissing(Access.INTERNAL.value)
        described: Any = descriptor_pool.Default().FindMethodByName(method.replace('/', '.'))
        if described.client_streaming:
            raise NotBuiltYet(f'{method} over gRPC-Web')


@dataclass(frozen=True)
class _WebResponse:
    """Response with the messages of a gRPC call and its status."""

    stub: Any
    request: bytes
    metadata: tuple[tuple[str, str], ...]
    timeout_seconds: float | None

    async def write(self, call: HttpCall) -> None:
        await call.begin(200, WEB_TYPE, _HEADERS)
        call.is_streaming = True
        # The HTTP server starts before the gRPC server, and a connection that takes longer than
        # `grpc.min_reconnect_backoff_ms` (100 ms), as on a busy machine, fails the calls that do not wait for it.
        rpc = self.stub(self.request, timeout=self.timeout_seconds, metadata=self.metadata, wait_for_ready=True)
        try:
            async for message in rpc:
                await _write_message(call, message)
            last = trailers_frame(0, '', _pairs(await rpc.trailing_metadata()))
        except grpc.aio.AioRpcError as error:
            last = _failure(call, error)
        finally:
            # Cancels the call if the browser has closed its connection.
            rpc.cancel()
        await call.write(last, is_last=True)


async def _write_message(call: HttpCall, message: bytes) -> None:
    """Write a message; memory for its bytes and its frame is reserved while the browser receives them."""
    call.release_body()
    await call.reserve_body(2 * len(message))
    # An error cannot be written inside a frame.
    call.is_streaming = False
    await call.write(message_frame(message), is_last=False)
    call.is_streaming = True
    call.release_body()


def _failure(call: HttpCall, error: grpc.aio.AioRpcError) -> bytes:
    """Return the last frame of a failed call, with the status that the server sent, and record the outcome."""
    known = error_from_call(error, service='gateway')
    call.outcome = known.reason
    if rpc_status.from_call(error) is None:  # pyright: ignore[reportArgumentType] (the types know no grpc.aio)
        return _error_frame(known, call.request_id)
    return trailers_frame(error.code().value[0], error.details() or '', _pairs(error.trailing_metadata()))


def _error_frame(error: DomainError, request_id: str) -> bytes:
    status = status_from_error(error)
    metadata = ((_DETAILS_KEY, status.SerializeToString()), (REQUEST_ID_KEY, request_id))
    return trailers_frame(status.code, status.message, metadata)


def _pairs(metadata: Any) -> list[tuple[str, str | bytes]]:
    return [(str(key), value) for key, value in metadata or ()]
