"""State of one served call, shared by the interceptor layers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from twinkle_services.kit.byte_gate import Hold
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.errors import InvalidField, MessageTooLarge
from twinkle_services.kit.ids import new_id
from twinkle_services.kit.rpc.message_elements import check_request_elements

UNKNOWN_METHOD = '_OTHER'
"""Label of all methods that the server does not have. Using their names as labels would let callers without credentials
create any number of labels."""
Context = grpc.aio.ServicerContext[Any, Any]
"""Context of a served call, which gRPC passes to the handler."""
Decoder = Callable[[bytes], Any]
"""Parses the bytes of a request; raises DecodeError for invalid bytes."""


@contextmanager
def cancelled_if_disconnected() -> Iterator[None]:
    """Cancel the call if the block cannot write to it, as grpc does shortly after the client has disconnected.

    Raises:
        CancelledError: The connection is closed, or the server has stopped.
        AbortError, UsageError: The block ended the call, or used it after its end.
    """
    try:
        yield
    except (grpc.aio.AbortError, grpc.aio.UsageError):
        raise
    except grpc.aio.BaseError as error:
        raise asyncio.CancelledError() from error


@dataclass
class Call:
    """Data of one call, which the interceptor layers fill in."""

    method: str
    """Full name, such as `/twinkle.api.model.v1.TrainingService/Execute`."""
    context: Context
    is_known: bool = True
    """Whether the server has the method."""
    is_stream: bool = False
    """Whether the call has a stream of requests or responses."""
    decode: Decoder | None = None
    """Parser of requests; None if the handler takes bytes."""
    metadata: Mapping[str, str] = field(default_factory=dict[str, str])
    """Text values of the caller's metadata."""
    request_id: str = field(default_factory=lambda: new_id('rq'))
    """Id of the call in logs and traces; a caller's own id replaces it once the caller is authenticated."""
    caller: Caller | None = None
    """Authenticated caller; None before the authentication, and if it fails."""
    recheck: Callable[[], Awaitable[object]] | None = None
    """Authenticates the caller again, for each message of a request stream; None if callers are not checked again."""
    status_name: str = 'OK'
    """Name of the call's final status."""
    hold: Hold | None = None
    """Memory that the messages of the call occupy; None if they are not counted."""
    message_limit_bytes: int = 0
    """Maximum size of one received message; 0 for no limit."""

    @classmethod
    def begin(
        cls,
        method: str,
        context: Context,
        *,
        decode: Decoder | None,
        is_known: bool = True,
        is_stream: bool = False,
    ) -> Call:
        """Return a new call with the text metadata of `context`."""
        pairs = context.invocation_metadata() or ()
        metadata = {str(key): value for key, value in pairs if isinstance(value, str)}
        return cls(method, context, is_known, is_stream, decode, metadata)

    @property
    def label(self) -> str:
        """Name of the method in metrics, spans and logs: `method`, or `_OTHER` for an unknown one."""
        return self.method if self.is_known else UNKNOWN_METHOD

    def peer_names(self) -> frozenset[str]:
        """Return the DNS names and URIs of the caller's certificate; empty without one."""
        found = self.context.auth_context()
        return frozenset(name.decode() for key in ('peer_dns', 'peer_uri') for name in found.get(key, ()))

    async def take(self, message: Any) -> None:
        """Count the bytes of a single message until the call finishes. `received` counts the messages of a stream.

        Raises:
            BytesFull: The tenant, or all tenants together, have too many bytes in flight.
        """
        if self.hold is not None and not hasattr(message, '__aiter__'):
            await self.hold.grow(len(message))

    async def received(self, message: Any) -> Any:
        """Return the parsed request, or a stream of parsed requests, after checking the sizes.

        Requests are parsed here and not by grpc, which would send its internal error message to the caller. For each
        message, the returned stream also authenticates the caller again and counts the bytes. It raises all errors
        during iteration.

        Raises:
            MessageTooLarge: The message is larger than the limit.
            InvalidField: The message cannot be parsed or has too many elements.
        """
        if hasattr(message, '__aiter__'):
            return self._received_stream(message)
        if self.message_limit_bytes and len(message) > self.message_limit_bytes:
            raise MessageTooLarge(size_bytes=len(message), limit_bytes=self.message_limit_bytes)
        if self.caller is None or not self.caller.is_internal:
            # Calls that services make themselves contain only messages that the gateway has checked.
            await check_request_elements(message, self.method)
        return self._decoded(message)

    def _decoded(self, message: bytes) -> Any:
        if self.decode is None:
            return message
        try:
            return self.decode(message)
        except DecodeError as error:
            raise InvalidField('request', 'cannot be parsed as a message of the contract') from error

    async def _received_stream(self, messages: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        async for message in messages:
            if self.recheck is not None:
                await self.recheck()
            await self.take(message)
            yield await self.received(message)
            if self.hold is not None:
                self.hold.shrink_to(0)
