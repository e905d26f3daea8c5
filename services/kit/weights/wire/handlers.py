"""Server handlers and client stub of WeightStreamService that use the chunk codec.

Servicers and callers use `StateChunk` instead of messages with a chunk, and generated messages otherwise. The bytes are
those of the contract, so clients in other languages can use their generated stubs.
"""

from collections.abc import AsyncIterator
from typing import Any

import grpc

from twinkle.api.checkpoint.v1 import weight_stream_service_pb2 as wire
from twinkle.checkpoint_engine import StateChunk
from twinkle_services.kit.weights.wire import codec

_SERVICE = wire.DESCRIPTOR.services_by_name['WeightStreamService'].full_name


def add_weight_stream(servicer: Any, server: grpc.aio.Server) -> None:
    """Register a servicer of WeightStreamService, like the generated function."""
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        'Publish': grpc.stream_unary_rpc_method_handler(
            servicer.Publish,
            request_deserializer=codec.decode_published,
            response_serializer=wire.PublishResponse.SerializeToString,
        ),
        'Subscribe': grpc.unary_stream_rpc_method_handler(
            servicer.Subscribe,
            request_deserializer=wire.SubscribeRequest.FromString,
            response_serializer=codec.encode_subscribed,
        ),
        'Fetch': grpc.unary_stream_rpc_method_handler(
            servicer.Fetch,
            request_deserializer=wire.FetchRequest.FromString,
            response_serializer=codec.encode_fetched,
        ),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))


class WeightStreamStub:
    """Calls WeightStreamService with `StateChunk` instead of messages with a chunk."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        """Create the methods of a stub on `channel`, which the caller closes."""
        # grpc's type stubs allow only serializers from bytes to bytes.
        calls: Any = channel
        self._publish = calls.stream_unary(
            f'/{_SERVICE}/Publish',
            request_serializer=codec.encode_published,
            response_deserializer=wire.PublishResponse.FromString,
        )
        self._subscribe = calls.unary_stream(
            f'/{_SERVICE}/Subscribe',
            request_serializer=wire.SubscribeRequest.SerializeToString,
            response_deserializer=codec.decode_subscribed,
        )
        self._fetch = calls.unary_stream(
            f'/{_SERVICE}/Fetch',
            request_serializer=wire.FetchRequest.SerializeToString,
            response_deserializer=codec.decode_fetched,
        )

    def publish(self, frames: AsyncIterator[StateChunk | wire.PublishRequest]) -> Any:
        """Start a call of Publish; await the call for its PublishResponse."""
        return self._publish(frames)

    def subscribe(self, request: wire.SubscribeRequest) -> Any:
        """Start a call of Subscribe; iterate over the call for StateChunk and SubscribeResponse."""
        return self._subscribe(request)

    def fetch(self, request: wire.FetchRequest) -> Any:
        """Start a call of Fetch; iterate over the call for StateChunk and FetchResponse."""
        return self._fetch(request)
