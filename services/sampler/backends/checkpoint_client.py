"""Weights from the checkpoint service; broken streams are taken up where they broke, digests checked."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

import grpc

from services.kit.caller import Caller
from services.kit.rpc.context import acting_for
from services.kit.rpc.status import error_from_call
from services.kit.rpc.weight_client import ReceivedState, WeightClient
from services.sampler.domain.adapter import AdapterWeights, CheckpointFacts
from services.sampler.ports import Synced, WeightUpdate
from twinkle.api.checkpoint.v1 import checkpoint_service_pb2, checkpoint_service_pb2_grpc
from twinkle.checkpoint_engine import unpack_state


class CheckpointClient:
    """Implements `ports.WeightSource`."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        """Use a channel of `open_channel` that leads to the checkpoint service; it stays the caller's to close."""
        self._weights = WeightClient(channel)
        self._checkpoints = checkpoint_service_pb2_grpc.CheckpointServiceStub(channel)

    async def follow(self, caller: Caller, adapter_id: str, held_version: int) -> AsyncGenerator[WeightUpdate, None]:
        """Yield versions as they come; see the port."""
        async with aclosing(self._weights.follow(adapter_id, held_version=held_version)) as events:
            while True:
                # Only while a call may begin: around the yield it would be the reader's caller, too.
                with acting_for(caller):
                    event = await anext(events)
                yield _weights_of(event) if isinstance(event, ReceivedState) else Synced()

    async def fetch(self, caller: Caller, adapter_id: str, version: int) -> AdapterWeights:
        """Return one version; see the port."""
        with acting_for(caller):
            return _weights_of(await self._weights.fetch_version(adapter_id, version))

    async def find_checkpoint(self, caller: Caller, path: str) -> CheckpointFacts:
        """Return what a checkpoint is now; see the port."""
        request = checkpoint_service_pb2.GetCheckpointRequest(checkpoint_path=path)
        try:
            with acting_for(caller):
                answer = await self._checkpoints.GetCheckpoint(request)
        except grpc.aio.AioRpcError as error:
            raise error_from_call(error, service='checkpoint') from error
        found = answer.checkpoint
        return CheckpointFacts(path=found.path, digest=found.digest, step_count=found.step_count)

    async def fetch_checkpoint(self, caller: Caller, path: str) -> AdapterWeights:
        """Return a checkpoint's weights; see the port."""
        with acting_for(caller):
            return _weights_of(await self._weights.fetch_checkpoint(path, is_adapter_only=True))


def _weights_of(received: ReceivedState) -> AdapterWeights:
    header, manifest = received.header, received.state.manifest
    return AdapterWeights(
        adapter_id=header.adapter_id,
        version=header.version.version,
        base_model=manifest.base_model,
        lora_config=manifest.lora_config,
        tensors=unpack_state(manifest, received.state.data),
        size_bytes=manifest.size_bytes,
        digest=manifest.digest,
    )
