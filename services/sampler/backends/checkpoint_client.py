"""Client of the checkpoint service. Broken streams resume after the last received byte, and digests are verified."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any

import grpc

from twinkle.api.checkpoint.v1 import checkpoint_service_pb2, checkpoint_service_pb2_grpc, weights_pb2
from twinkle.checkpoint_engine import PackedState, unpack_state
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.rpc.context import acting_for
from twinkle_services.kit.rpc.status import error_from_call
from twinkle_services.kit.weights import Devices, Segments
from twinkle_services.kit.weights.wire import ReceivedState, WeightClient
from twinkle_services.sampler.domain.adapter import AdapterWeights, CheckpointFacts
from twinkle_services.sampler.ports import Synced, WeightUpdate


class CheckpointClient:
    """Implements `ports.WeightSource`."""

    def __init__(
        self, channel: grpc.aio.Channel, *, segments: Segments | None = None, devices: Devices | None = None
    ) -> None:
        """Create a client.

        Args:
            channel: Channel to the checkpoint service, opened with `open_channel`; the caller closes it.
            segments: Shared memory of this host; without it, weights are sent as bytes.
            devices: Device transports of this sampler; without them, gRPC sends all bytes.
        """
        self._weights = WeightClient(channel, segments=segments, devices=devices)
        self._checkpoints = checkpoint_service_pb2_grpc.CheckpointServiceStub(channel)

    async def follow(
        self, caller: Caller, adapter_id: str, held: AdapterWeights | None
    ) -> AsyncGenerator[WeightUpdate, None]:
        async with aclosing(self._weights.follow(adapter_id, **held_by(held))) as events:
            while True:
                # The caller is set only here, where a call may start. A block around the yield would also set the
                # caller for the code that reads the updates.
                with acting_for(caller):
                    event = await anext(events)
                yield weights_of(event) if isinstance(event, ReceivedState) else Synced()

    async def fetch(self, caller: Caller, adapter_id: str, version: int) -> AdapterWeights:
        with acting_for(caller):
            return weights_of(await self._weights.fetch_version(adapter_id, version))

    async def find_checkpoint(self, caller: Caller, path: str) -> CheckpointFacts:
        request = checkpoint_service_pb2.GetCheckpointRequest(checkpoint_path=path)
        try:
            with acting_for(caller):
                response = await self._checkpoints.GetCheckpoint(request)
        except grpc.aio.AioRpcError as error:
            raise error_from_call(error, service='checkpoint') from error
        found = response.checkpoint
        return CheckpointFacts(path=found.path, digest=found.digest, step_count=found.step_count)

    async def fetch_checkpoint(self, caller: Caller, path: str) -> AdapterWeights:
        with acting_for(caller):
            return weights_of(await self._weights.fetch_checkpoint(path, is_adapter_only=True))


def held_by(held: AdapterWeights | None) -> dict[str, Any]:
    """Return the arguments of `WeightClient.follow` that describe the version that the follower has."""
    if held is None:
        return {}
    return {'held_version': held.version, 'held': held.packed if isinstance(held.packed, PackedState) else None}


def weights_of(received: ReceivedState) -> AdapterWeights:
    """Convert a received state to adapter weights; the tensors are views of the received bytes."""
    header, manifest = received.header, received.state.manifest
    return AdapterWeights(
        adapter_id=header.adapter_id,
        version=header.version.version,
        base_model=manifest.base_model,
        lora_config=manifest.lora_config,
        tensors=unpack_state(manifest, received.state.data),
        size_bytes=manifest.size_bytes,
        digest=manifest.digest,
        packed=received.state,
        publish_time=_publish_time(header.version),
        segment_path=received.segment_path,
    )


def _publish_time(version: weights_pb2.VersionTarget) -> datetime | None:
    return version.publish_time.ToDatetime(UTC) if version.HasField('publish_time') else None
