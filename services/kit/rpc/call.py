"""One call being served, as the interceptor layers see it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from services.kit.byte_gate import Hold
from services.kit.caller import Caller
from services.kit.errors import InvalidField, MessageTooLarge

Decoder = Callable[[bytes], Any]
"""Makes a request of its bytes; raises DecodeError where it cannot."""


@dataclass
class Call:
    """Facts about a call; the layers fill them in as they learn them."""

    method: str
    """'/twinkle.api.model.v1.TrainingService/Execute'."""
    context: grpc.aio.ServicerContext[Any, Any]
    decode: Decoder | None = None
    """Makes a request of its bytes; None where bytes are passed on as they are."""
    metadata: Mapping[str, str] = field(default_factory=dict[str, str])
    """What the caller sent beside the request; text values only."""
    request_id: str = ''
    caller: Caller | None = None
    status_name: str = 'OK'
    """Name of the status the call ended with."""
    hold: Hold | None = None
    """What its messages take of the memory there is for them; None where they are not counted."""
    message_limit_bytes: int = 0
    """Most bytes of one received message; 0 is no limit."""

    @classmethod
    def begin(cls, method: str, context: grpc.aio.ServicerContext[Any, Any], *, decode: Decoder | None) -> Call:
        """Return the call of a context."""
        pairs = context.invocation_metadata() or ()
        metadata = {str(key): value for key, value in pairs if isinstance(value, str)}
        return cls(method, context, decode=decode, metadata=metadata)

    def peer_names(self) -> frozenset[str]:
        """Return the DNS names and URIs in the certificate that the caller showed; none where it showed none."""
        found = self.context.auth_context()
        return frozenset(name.decode() for key in ('peer_dns', 'peer_uri') for name in found.get(key, ()))

    async def take(self, message: Any) -> None:
        """Count a message until the call ends; those of a stream are counted as they come.

        Raises:
            BytesFull: its tenant, or all, have too many bytes under way.
        """
        if self.hold is not None and not hasattr(message, '__aiter__'):
            await self.hold.grow(len(message))

    def received(self, message: Any) -> Any:
        """Return the request whose bytes are `message`, or a stream of them, with each one's size checked.

        Bytes are decoded here and not by grpc, which would end the call with a library's words.

        Raises:
            MessageTooLarge, InvalidField: at once for a message, while iterating for a stream.
        """
        if hasattr(message, '__aiter__'):
            return self._received_stream(message)
        if self.message_limit_bytes and len(message) > self.message_limit_bytes:
            raise MessageTooLarge(size_bytes=len(message), limit_bytes=self.message_limit_bytes)
        return self._decoded(message)

    def _decoded(self, message: bytes) -> Any:
        if self.decode is None:
            return message
        try:
            return self.decode(message)
        except DecodeError as error:
            raise InvalidField('request', 'its bytes are no message that the contract describes') from error

    async def _received_stream(self, messages: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        async for message in messages:
            await self.take(message)
            yield self.received(message)
            if self.hold is not None:
                self.hold.shrink_to(0)
