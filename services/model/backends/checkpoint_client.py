"""The checkpoint service as the trainer's weight store."""

import asyncio

import grpc

from services.kit.errors import InvalidField
from services.kit.rpc.fields import duration_to_proto
from services.kit.rpc.weights import ReceivedState, WeightClient
from services.kit.weights import Segments
from services.model.domain.engine import AdapterState
from services.model.domain.operation import Save
from services.model.domain.result import PublishResult, SaveResult
from twinkle.api.checkpoint.v1 import weights_pb2
from twinkle.checkpoint_engine import StateSection, unpack_state
from twinkle.checkpoint_engine.packing import StatePlan, plan_state
from twinkle.data_format import LoraConfig


class CheckpointClient:
    """Implements `services.model.ports.WeightStore`; acts for the current caller."""

    def __init__(self, channel: grpc.aio.Channel, *, segments: Segments | None = None, base_model: str = '') -> None:
        """Use a channel of `services.kit.rpc.channel.open_channel`; it stays the caller's to close.

        Args:
            channel: Leads to the checkpoint service.
            segments: Memory that may be shared with it. Unset: bytes are sent.
            base_model: What checkpoints have to be of, by name. Empty: of any.
        """
        self._base_model = base_model
        self._weights = WeightClient(channel, segments=segments)

    async def publish_version(
        self, adapter_id: str, state: AdapterState, *, base_model: str, version: int, is_pinned: bool
    ) -> PublishResult:
        """Make `state` a version; see the port."""
        plan = _plan(state, base_model)
        made = await self._weights.publish_version(adapter_id, plan, version=version, is_pinned=is_pinned)
        return PublishResult(version=made.version, digest=made.digest, size_bytes=made.size_bytes)

    async def save(
        self, adapter_id: str, state: AdapterState, *, base_model: str, save: Save, request_id: str
    ) -> SaveResult:
        """Make `state` a durable checkpoint; see the port."""
        target = weights_pb2.CheckpointTarget(
            name=save.name,
            is_overwrite_allowed=save.is_overwrite_allowed,
            step_count=state.step_count,
            ttl=None if save.ttl is None else duration_to_proto(save.ttl),
            request_id=request_id,
            user_metadata=save.user_metadata,
        )
        made = (await self._weights.save_checkpoint(adapter_id, _plan(state, base_model), target)).checkpoint
        return SaveResult(checkpoint_path=made.path, size_bytes=made.size_bytes, folder=made.folder)

    async def fetch(self, checkpoint_path: str, *, is_trainer_included: bool) -> AdapterState:
        """Return a checkpoint's state; see the port.

        Raises:
            InvalidField: it is of another base model, or the trainer's part is asked for and was not saved.
        """
        received = await self._weights.fetch_checkpoint(checkpoint_path, is_adapter_only=not is_trainer_included)
        saved_of = received.state.manifest.base_model
        if self._base_model and saved_of != self._base_model:
            raise InvalidField('checkpoint_path', f'is of base model {saved_of!r}, not of {self._base_model!r}')
        if received.state.manifest.lora_config is None:
            raise InvalidField('checkpoint_path', "holds a model's own weights, no adapter's")
        if is_trainer_included and not received.state.manifest.is_trainer_included:
            raise InvalidField('checkpoint_path', 'was saved without its optimizer; load the weights alone')
        return await asyncio.to_thread(_unpack, received)


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
    )
