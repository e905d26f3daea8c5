"""The catalogue's feeds: adapters from the model service, checkpoints from the checkpoint service."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime

import grpc
from google.protobuf.timestamp_pb2 import Timestamp

from services.gateway.catalogue.checkpoint_messages import checkpoint_from_proto
from services.gateway.catalogue.rules import CatalogueEvent, Checkpoint, Gone, Run, Seen, Synced
from services.kit.rpc.status import error_from_call
from twinkle.api.checkpoint.v1 import checkpoint_service_pb2, checkpoint_service_pb2_grpc
from twinkle.api.model.v1 import adapter_service_pb2, adapter_service_pb2_grpc


class GrpcRunFeed:
    """Follows the adapters of all tenants; each is a run."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        """Follow over `channel`, opened with the internal identity."""
        self._stub = adapter_service_pb2_grpc.AdapterServiceStub(channel)

    async def follow(self, resume_token: str) -> AsyncIterator[CatalogueEvent[Run]]:
        """Return the events after `resume_token`; empty: a whole snapshot, `Synced`, then changes.

        Raises:
            DomainError: while iterating: the service cannot be reached, or does not know the token any more.
        """
        call = self._stub.WatchAdapters(adapter_service_pb2.WatchAdaptersRequest(resume_token=resume_token))
        try:
            async for message in call:
                if (event := _run_event(message)) is not None:
                    yield event
        except grpc.aio.AioRpcError as error:
            raise error_from_call(error, service='model') from error
        finally:
            call.cancel()


class GrpcCheckpointFeed:
    """Follows the checkpoints of all tenants."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        """Follow over `channel`, opened with the internal identity."""
        self._stub = checkpoint_service_pb2_grpc.CheckpointServiceStub(channel)

    async def follow(self, resume_token: str) -> AsyncIterator[CatalogueEvent[Checkpoint]]:
        """Return the events after `resume_token`; empty: a whole snapshot, `Synced`, then changes.

        Raises:
            DomainError: while iterating: the service cannot be reached, or does not know the token any more.
        """
        call = self._stub.WatchCheckpoints(checkpoint_service_pb2.WatchCheckpointsRequest(resume_token=resume_token))
        try:
            async for message in call:
                if (event := _checkpoint_event(message)) is not None:
                    yield event
        except grpc.aio.AioRpcError as error:
            raise error_from_call(error, service='checkpoint') from error
        finally:
            call.cancel()


def _run_event(message: adapter_service_pb2.WatchAdaptersResponse) -> CatalogueEvent[Run] | None:
    """Return the event; None for a kind that a newer service may have."""
    match message.WhichOneof('event'):
        case 'adapter':
            adapter = message.adapter
            run = Run(
                run_id=adapter.adapter_id,
                tenant_id=message.tenant_id,
                base_model=adapter.base_model,
                lora_rank=adapter.lora_config.lora_rank,
                step_count=adapter.step_count,
                version=adapter.version,
                user_metadata=dict(adapter.user_metadata),
                is_active=True,
                create_time=_moment(adapter.create_time),
                update_time=_moment(adapter.update_time),
                session_id=adapter.session_id,
            )
            return Seen(key=(run.tenant_id, run.run_id), entry=run, resume_token=message.resume_token)
        case 'deletion':
            return Gone(key=(message.tenant_id, message.deletion.adapter_id), resume_token=message.resume_token)
        case 'is_synced':
            return Synced(resume_token=message.resume_token)
        case None:
            return None


def _checkpoint_event(
    message: checkpoint_service_pb2.WatchCheckpointsResponse,
) -> CatalogueEvent[Checkpoint] | None:
    """Return the event; None for a kind that a newer service may have."""
    match message.WhichOneof('event'):
        case 'checkpoint':
            checkpoint = checkpoint_from_proto(message.checkpoint, tenant_id=message.tenant_id)
            key = checkpoint.tenant_id, checkpoint.checkpoint_id
            return Seen(key=key, entry=checkpoint, resume_token=message.resume_token)
        case 'deletion':
            return Gone(key=(message.tenant_id, message.deletion.checkpoint_id), resume_token=message.resume_token)
        case 'is_synced':
            return Synced(resume_token=message.resume_token)
        case None:
            return None


def _moment(timestamp: Timestamp) -> datetime:
    return timestamp.ToDatetime(tzinfo=UTC)
