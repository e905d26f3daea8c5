"""The checkpoint service as the trainer's weight store."""

import asyncio

import grpc

from services.kit.errors import InvalidField
from services.kit.rpc.fields import duration_to_proto
from services.kit.rpc.weight_client import ReceivedState, WeightClient
from services.model.domain.operation import Save
from services.model.domain.result import PublishResult, SaveResult
from services.model.ports import AdapterState
from twinkle.api.checkpoint.v1 import weights_pb2
from twinkle.checkpoint_engine import PackedState, StateSection, pack_state, unpack_state


class CheckpointClient:
    """Implements `services.model.ports.WeightStore`; acts for the current caller."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        """Use a channel of `services.kit.rpc.channel.open_channel`; it stays the caller's to close."""
        self._weights = WeightClient(channel)

    async def publish_version(
        self, adapter_id: str, state: AdapterState, *, base_model: str, version: int, is_pinned: bool
    ) -> PublishResult:
        """Make `state` a version; see the port."""
        packed = await asyncio.to_thread(_pack, state, base_model)
        made = await self._weights.publish_version(adapter_id, packed, version=version, is_pinned=is_pinned)
        return PublishResult(version=made.version, digest=made.digest, size_bytes=made.size_bytes)

    async def save(
        self, adapter_id: str, state: AdapterState, *, base_model: str, save: Save, request_id: str
    ) -> SaveResult:
        """Make `state` a durable checkpoint; see the port."""
        packed = await asyncio.to_thread(_pack, state, base_model)
        target = weights_pb2.CheckpointTarget(
            name=save.name,
            is_overwrite_allowed=save.is_overwrite_allowed,
            step_count=state.step_count,
            ttl=None if save.ttl is None else duration_to_proto(save.ttl),
            request_id=request_id,
        )
        made = (await self._weights.save_checkpoint(adapter_id, packed, target)).checkpoint
        return SaveResult(checkpoint_path=made.path, size_bytes=made.size_bytes, folder=made.folder)

    async def fetch(self, checkpoint_path: str, *, is_trainer_included: bool) -> AdapterState:
        """Return a checkpoint's state; see the port.

        Raises:
            InvalidField: the trainer's part is asked for and was not saved.
        """
        received = await self._weights.fetch_checkpoint(checkpoint_path, is_adapter_only=not is_trainer_included)
        if is_trainer_included and not received.state.manifest.is_trainer_included:
            raise InvalidField('checkpoint_path', 'was saved without its optimizer; load the weights alone')
        return await asyncio.to_thread(_unpack, received)


def _pack(state: AdapterState, base_model: str) -> PackedState:
    return pack_state(
        state.adapter, base_model=base_model, lora_config=state.lora_config, trainer=state.trainer or None
    )


def _unpack(received: ReceivedState) -> AdapterState:
    manifest, data = received.state.manifest, received.state.data
    return AdapterState(
        lora_config=manifest.lora_config,
        adapter=unpack_state(manifest, data),
        trainer=unpack_state(manifest, data, section=StateSection.TRAINER),
        step_count=received.header.checkpoint.step_count,
    )
