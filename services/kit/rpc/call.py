"""One call being served, as the interceptor layers see it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc

from services.kit.caller import Caller
from services.kit.errors import MessageTooLarge


@dataclass
class Call:
    """Facts about a call; the layers fill them in as they learn them."""

    method: str
    """'/twinkle.api.model.v1.TrainingService/Execute'."""
    context: grpc.aio.ServicerContext[Any, Any]
    metadata: Mapping[str, str] = field(default_factory=dict[str, str])
    """What the caller sent beside the request; text values only."""
    request_id: str = ''
    caller: Caller | None = None
    status_name: str = 'OK'
    """Name of the status the call ended with."""
    message_limit_bytes: int = 0
    """Most bytes of one received message; 0 is no limit."""

    @classmethod
    def begin(cls, method: str, context: grpc.aio.ServicerContext[Any, Any]) -> Call:
        """Return the call of a context."""
        pairs = context.invocation_metadata() or ()
        return cls(method, context, {str(key): value for key, value in pairs if isinstance(value, str)})

    def received(self, message: Any) -> Any:
        """Return `message`, or the same stream of messages, with each one's size checked.

        Raises:
            MessageTooLarge: at once for a message, while iterating for a stream.
        """
        if hasattr(message, '__aiter__'):
            return self._received_stream(message)
        size = len(message) if isinstance(message, bytes) else message.ByteSize()
        if self.message_limit_bytes and size > self.message_limit_bytes:
            raise MessageTooLarge(size_bytes=size, limit_bytes=self.message_limit_bytes)
        return message

    async def _received_stream(self, messages: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for message in messages:
            yield self.received(message)
