"""Checkpoints of a tenant: found, changed, brought in, taken away, and sent to hubs."""

import asyncio
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

from twinkle.api.checkpoint.v1 import checkpoint_pb2, checkpoint_service_pb2
from twinkle.api.checkpoint.v1.checkpoint_service_pb2_grpc import CheckpointServiceStub
from twinkle.api.gateway.v1 import catalogue_service_pb2, export_service_pb2
from twinkle.api.gateway.v1.catalogue_service_pb2_grpc import CatalogueServiceStub
from twinkle.api.gateway.v1.export_service_pb2_grpc import ExportServiceStub
from twinkle.api.server.v1 import server_service_pb2
from twinkle.api.server.v1.server_service_pb2_grpc import ServerServiceStub
from twinkle_client.archives import ReportBytes, UploadOrder, ignore_progress, upload_adapter
from twinkle_client.client import TwinkleClient, current_client
from twinkle_client.rpc import LoopThread, remote_method
from twinkle_client.rpc.ids import new_id

ENDED = frozenset(
    {
        export_service_pb2.EXPORT_STATE_DONE,
        export_service_pb2.EXPORT_STATE_FAILED,
        export_service_pb2.EXPORT_STATE_CANCELLED,
    }
)
"""States of exports of which nothing more will become."""
_POLL_SECONDS = 1.0


class CheckpointLibrary:
    """What a tenant keeps."""

    def __init__(self, *, client: TwinkleClient | None = None) -> None:
        """Use `client`, or the one that was initialised last."""
        self._connection = current_client(client).connection
        channel = self._connection.channel
        self._checkpoints = CheckpointServiceStub(channel)
        self._catalogue = CatalogueServiceStub(channel)
        self._exports = ExportServiceStub(channel)
        self._server = ServerServiceStub(channel)

    @property
    def loop_thread(self) -> LoopThread:
        """Where its coroutines run."""
        return self._connection.loop_thread

    @remote_method
    async def publish(self, path: str) -> None:
        """Let every tenant read a checkpoint.

        Raises:
            NotFoundError: there is none at that path.
            ConflictError: another tenant's of that path is public.
        """
        request = catalogue_service_pb2.PublishCheckpointRequest(checkpoint_path=path)
        await self._connection.unary(self._catalogue.PublishCheckpoint, request)

    @remote_method
    async def unpublish(self, path: str) -> None:
        """Take that back.

        Raises:
            NotFoundError: there is none at that path.
        """
        request = catalogue_service_pb2.UnpublishCheckpointRequest(checkpoint_path=path)
        await self._connection.unary(self._catalogue.UnpublishCheckpoint, request)

    @remote_method
    async def set_ttl(self, path: str, ttl: timedelta | None) -> checkpoint_pb2.Checkpoint:
        """Have a checkpoint deleted after `ttl` from now; None keeps it.

        Raises:
            NotFoundError: there is none at that path.
        """
        request = checkpoint_service_pb2.SetCheckpointTtlRequest(checkpoint_path=path)
        if ttl is not None:
            request.ttl.FromTimedelta(ttl)
        return (await self._connection.unary(self._checkpoints.SetCheckpointTtl, request)).checkpoint

    @remote_method
    async def upload(
        self,
        source: str | Path,
        name: str,
        *,
        base_model: str = '',
        user_metadata: Mapping[str, str] | None = None,
        report: ReportBytes = ignore_progress,
    ) -> checkpoint_pb2.Checkpoint:
        """Make a checkpoint of an adapter that peft or another tool saved, in a run of its own.

        An upload that was cut, also by the end of the program, goes on where it stopped when it is called again.

        Args:
            source: a peft folder with its weights in safetensors, or a `.tar` or `.tar.gz` of one.
            name: of the checkpoint.
            base_model: what it adapts. Empty: the only one that is trained on the server.
            user_metadata: labels of the checkpoint.
            report: told how many bytes are sent, of how many.

        Raises:
            ValueError: the folder is no peft folder, or the server has several base models.
            UsageError: the server does not take it; the message says why.
        """
        order = UploadOrder(
            source=Path(source),
            name=name,
            base_model=base_model or await self._only_base_model(),
            user_metadata=dict(user_metadata or {}),
        )
        return await upload_adapter(self._connection, order, report=report)

    @remote_method
    async def push(
        self, path: str, target: str, *, token: str = '', is_private: bool = True
    ) -> export_service_pb2.Export:
        """Have the server send a checkpoint to `hf://<owner>/<name>` or `file:///<folder>`, in the background.

        The same push again, while it is under way, is the same export.

        Args:
            path: of the checkpoint.
            target: where it goes; a folder is one below that which the operator has set aside.
            token: of someone who may write to the hub; the server keeps it encrypted until the export is over.
            is_private: whether a repository that is made can be seen by its owner only.

        Returns:
            The export as it was accepted; `get_export` tells how far it is, `wait_export` waits for its end.
        """
        request = export_service_pb2.StartExportRequest(
            request_id=new_id('ex'), checkpoint_path=path, target=target, hub_token=token, is_private=is_private
        )
        return (await self._connection.unary(self._exports.StartExport, request)).export

    @remote_method
    async def get_export(self, export_id: str) -> export_service_pb2.Export:
        """Return an export.

        Raises:
            NotFoundError: there is none of that id.
        """
        return await self._get_export(export_id)

    @remote_method
    async def wait_export(self, export_id: str, *, report: ReportBytes = ignore_progress) -> export_service_pb2.Export:
        """Return an export once nothing more will become of it.

        Raises:
            NotFoundError: there is none of that id.
        """
        while True:
            export = await self._get_export(export_id)
            report(export.read_bytes, export.size_bytes)
            if export.state in ENDED:
                return export
            await asyncio.sleep(_POLL_SECONDS)

    @remote_method
    async def list_exports(self) -> list[export_service_pb2.Export]:
        """Return the caller's exports, newest first."""
        found: list[export_service_pb2.Export] = []
        request = export_service_pb2.ListExportsRequest(page_size=1000)
        while True:
            page = await self._connection.unary(self._exports.ListExports, request)
            found += page.exports
            if not page.next_page_token:
                return found
            request.page_token = page.next_page_token

    @remote_method
    async def cancel_export(self, export_id: str) -> export_service_pb2.Export:
        """End an export, unless it is over, and return it.

        Raises:
            NotFoundError: there is none of that id.
        """
        request = export_service_pb2.CancelExportRequest(export_id=export_id)
        return (await self._connection.unary(self._exports.CancelExport, request)).export

    async def _get_export(self, export_id: str) -> export_service_pb2.Export:
        request = export_service_pb2.GetExportRequest(export_id=export_id)
        return (await self._connection.unary(self._exports.GetExport, request)).export

    async def _only_base_model(self) -> str:
        info = await self._connection.unary(self._server.GetServerInfo, server_service_pb2.GetServerInfoRequest())
        models = {model.base_model for item in info.services for model in item.base_models if model.is_trainable}
        if len(models) != 1:
            raise ValueError(f'name the base model: the server has {", ".join(sorted(models)) or "none"}')
        return models.pop()
