"""Stores versions and checkpoints in the checkpoint service, and fetches checkpoints from it."""

import asyncio

import grpc

from twinkle.api.checkpoint.v1 import (
    checkpoint_service_pb2,
    checkpoint_service_pb2_grpc,
    version_service_pb2,
    version_service_pb2_grpc,
    weights_pb2,
)
from twinkle.checkpoint_engine import StateSection, unpack_state
from twinkle.checkpoint_engine.packing import StatePlan, plan_state
from twinkle.data_format import LoraConfig
from twinkle_services.kit.errors import Code, InvalidField
from twinkle_services.kit.rpc.fields import duration_to_proto
from twinkle_services.kit.rpc.status import error_from_call
from twinkle_services.kit.weights import Segments
from twinkle_services.kit.weights.wire import ReceivedState, WeightClient
from twinkle_services.model.domain.engine import AdapterState
from twinkle_services.model.domain.operation import Save
from twinkle_services.model.domain.result import PublishResult, SaveResult


class CheckpointClient:
    """Implements `twinkle_services.model.ports.WeightStore`; acts on behalf of the current caller."""

    def __init__(self, channel: grpc.aio.Channel, *, segments: Segments | None = None, base_model: str = '') -> None:
        """Initialize the client; the caller closes the channel.

        Args:
            channel: Channel to the checkpoint service.
            segments: Shared memory for passing states on the same host; None to send bytes.
            base_model: Required base model of fetched checkpoints; empty to accept all base models.
        """
        self._base_model = base_model
        self._weights = WeightClient(channel, segments=segments)
        self._checkpoints = checkpoint_service_pb2_grpc.CheckpointServiceStub(channel)
        self._versions = version_service_pb2_grpc.VersionServiceStub(channel)

    async def publish_version(
        self, adapter_id: str, state: AdapterState, *, base_model: str, version: int, is_pinned: bool
    ) -> PublishResult:
        plan = _plan(state, base_model)
        published = await self._weights.publish_version(adapter_id, plan, version=version, is_pinned=is_pinned)
        return PublishResult(version=published.version, digest=published.digest, size_bytes=published.size_bytes)

    async def save(
        self, adapter_id: str, state: AdapterState, *, base_model: str, save: Save, request_id: str
    ) -> SaveResult:
        target = weights_pb2.CheckpointTarget(
            name=save.name,
            is_overwrite_allowed=save.is_overwrite_allowed,
            step_count=state.step_count,
            ttl=None if save.ttl is None else duration_to_proto(save.ttl),
            request_id=request_id,
            user_metadata=save.user_metadata,
        )
        saved = (await self._weights.save_checkpoint(adapter_id, _plan(state, base_model), target)).checkpoint
        return SaveResult(checkpoint_path=saved.path, size_bytes=saved.size_bytes, folder=saved.folder)

    async def fetch(self, checkpoint_path: str, *, is_trainer_included: bool) -> AdapterState:
        """Return a checkpoint's state; its `full_parameters` is `()` for full model weights, and None for LoRA weights.

        Raises:
            InvalidField: The checkpoint has a different base model, or lacks the requested state of the trainer.
            DomainError: The checkpoint cannot be read; see `WeightStore.fetch`.
        """
        received = await self._weights.fetch_checkpoint(checkpoint_path, is_adapter_only=not is_trainer_included)
        base_model = received.state.manifest.base_model
        if self._base_model and base_model != self._base_model:
            raise InvalidField(
                'checkpoint_path',
                f'has base model {base_model!r}, but this service serves {self._base_model!r}; use a checkpoint of the '
                'same base model',
            )
        if is_trainer_included and not received.state.manifest.is_trainer_included:
            raise InvalidField('checkpoint_path', 'was saved without its optimizer; load it without the optimizer')
        return await asyncio.to_thread(_unpack, received)

    async def has_lasting_checkpoint(self, checkpoint_path: str) -> bool:
        request = checkpoint_service_pb2.VerifyCheckpointRequest(checkpoint_path=checkpoint_path)
        try:
            found = (await self._checkpoints.VerifyCheckpoint(request)).checkpoint
        except grpc.aio.AioRpcError as failure:
            error = error_from_call(failure, service='checkpoint')
            if error.code in {Code.NOT_FOUND, Code.DATA_LOSS}:
                return False
            raise error from failure
        return not found.HasField('expire_time')

    async def delete_versions(self, adapter_id: str) -> None:
        request = version_service_pb2.DeleteVersionsRequest(adapter_id=adapter_id)
        try:
            await self._versions.DeleteVersions(request)
        except grpc.aio.AioRpcError as failure:
            raise error_from_call(failure, service='checkpoint') from failure


def _plan(state: AdapterState, base_model: str) -> StatePlan:
    lora_config = state.lora_config if state.full_parameters is None else None
    return plan_state(state.adapter, base_model=base_model, lora_config=lora_config, trainer=state.trainer or None)


def _unpack(received: ReceivedState) -> AdapterState:
    manifest, data = received.state.manifest, received.state.data
    return AdapterState(
        lora_config=manifest.lora_config or LoraConfig(),
        adapter=unpack_state(manifest, data),
        trainer=unpack_state(manifest, data, section=StateSection.TRAINER),
        step_count=received.header.checkpoint.step_count,
        full_parameters=() if manifest.lora_config is None else None,
    )
