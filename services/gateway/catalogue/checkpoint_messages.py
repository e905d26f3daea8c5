"""Checkpoints as the checkpoint service tells of them."""

from datetime import UTC

from services.gateway.catalogue.rules import Checkpoint
from twinkle.api.checkpoint.v1 import checkpoint_pb2


def checkpoint_from_proto(message: checkpoint_pb2.Checkpoint, *, tenant_id: str) -> Checkpoint:
    """Return a tenant's checkpoint."""
    is_kept = not message.HasField('expire_time')
    return Checkpoint(
        checkpoint_id=message.checkpoint_id,
        tenant_id=tenant_id,
        run_id=message.adapter_id,
        name=message.name,
        path=message.path,
        base_model=message.base_model,
        is_optimizer_included=message.is_optimizer_included,
        size_bytes=message.size_bytes,
        step_count=message.step_count,
        digest=message.digest,
        folder=message.folder,
        create_time=message.create_time.ToDatetime(tzinfo=UTC),
        expire_time=None if is_kept else message.expire_time.ToDatetime(tzinfo=UTC),
        is_public=message.is_public,
        user_metadata=dict(message.user_metadata),
        lora_rank=message.lora_rank,
    )
