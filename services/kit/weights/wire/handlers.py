"""WeightStreamService as it is served and called here: the same contract and bytes, chunks past protobuf.

A servicer is given, and gives, `StateChunk` in place of messages that hold one; every other message is
the generated one. Other languages use their generated stubs.
"""

from collections.abc import AsyncIterator
from typing import Any

import grpc

from services.kit.weights.wire import codec
from twinkle.api.checkpoint.v1 import weight_stream_service_pb2 as wire
from twinkle.checkpoint_engine import StateChunk

_SERVICE = wire.DESCRIPTOR.services_by_name['WeightStreamService'].full_name


def add_weight_stream(servicer: Any, server: grpc.aio.Server) -> None:
    """Register a servicer of WeightStreamService, as the generated function would."""
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
    """Calls WeightStreamService with values in place of messages that hold a chunk."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        """Use a channel, which stays the caller's to close."""
        # grpc's own types know bytes-to-bytes serializers only.
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
        """Begin a publish; await the call for its PublishResponse."""
        return self._publish(frames)

    def subscribe(self, request: wire.SubscribeRequest) -> Any:
        """Begin a subscription; iterate the call for StateChunk and SubscribeResponse."""
        return self._subscribe(request)

    def fetch(self, request: wire.FetchRequest) -> Any:
        """Begin a fetch; iterate the call for StateChunk and FetchResponse."""
        return self._fetch(request)
