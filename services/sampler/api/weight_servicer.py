"""Servicer of the weight stream that a sampler relays to other samplers. Publishing is not supported.

Chunk frames are yielded as `StateChunk` values; the handlers of `twinkle_services.kit.weights.wire` serialize them.
"""

# ruff: noqa: N802 (the methods have the names of the RPCs)

from collections.abc import AsyncIterator
from contextlib import aclosing

from twinkle.api.checkpoint.v1 import weight_stream_service_pb2 as wire
from twinkle.api.checkpoint.v1 import weight_stream_service_pb2_grpc
from twinkle.checkpoint_engine import StateChunk
from twinkle_services.kit.errors import InvalidField
from twinkle_services.kit.rpc.call import Context
from twinkle_services.kit.rpc.context import current_caller
from twinkle_services.kit.rpc.fields import adapter_id_from_proto, not_negative
from twinkle_services.kit.weights import Frame
from twinkle_services.kit.weights.wire import (
    fetch_options_from_proto,
    frame_to_fetched,
    frame_to_subscribed,
    receiver_options_from_proto,
)
from twinkle_services.sampler.application.relay import FetchRequest, Relay, SubscribeRequest
from twinkle_services.sampler.ports import Synced


class WeightServicer(weight_stream_service_pb2_grpc.WeightStreamServiceServicer):
    """Serves WeightStreamService except for Publish."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay

    async def Subscribe(  # pyright: ignore[reportIncompatibleMethodOverride] (chunks are not messages)
        self, request: wire.SubscribeRequest, context: Context
    ) -> AsyncIterator[StateChunk | wire.SubscribeResponse]:
        async with aclosing(self._relay.subscribe(current_caller(), subscribe_from_proto(request))) as events:
            async for event in events:
                yield subscribed_to_proto(event)

    async def Fetch(  # pyright: ignore[reportIncompatibleMethodOverride] (chunks are not messages)
        self, request: wire.FetchRequest, context: Context
    ) -> AsyncIterator[StateChunk | wire.FetchResponse]:
        async with aclosing(self._relay.fetch(current_caller(), fetch_from_proto(request))) as frames:
            async for frame in frames:
                yield frame_to_fetched(frame)


def subscribe_from_proto(request: wire.SubscribeRequest) -> SubscribeRequest:
    """Convert a Subscribe request.

    Raises:
        InvalidField: A field is malformed or negative.
    """
    return SubscribeRequest(
        adapter_id=adapter_id_from_proto(request.adapter_id, 'adapter_id'),
        held_version=not_negative(request.held_version, 'held_version'),
        resume_version=not_negative(request.resume_version, 'resume_version'),
        is_single=request.is_single,
        receiver=receiver_options_from_proto(request),
    )


def subscribed_to_proto(event: Frame | Synced) -> StateChunk | wire.SubscribeResponse:
    return wire.SubscribeResponse(is_synced=True) if isinstance(event, Synced) else frame_to_subscribed(event)


def fetch_from_proto(request: wire.FetchRequest) -> FetchRequest:
    """Convert a Fetch request.

    Raises:
        InvalidField: The request does not name a version, or a field is malformed or negative.
    """
    if request.WhichOneof('state') != 'version':
        raise InvalidField('state', 'must name a version; fetch checkpoints from the checkpoint service')
    return FetchRequest(
        adapter_id=adapter_id_from_proto(request.version.adapter_id, 'version.adapter_id'),
        version=not_negative(request.version.version, 'version.version'),
        receiver=fetch_options_from_proto(request),
    )
