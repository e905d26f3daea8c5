"""A tenant's stored checkpoints: publication, lifetime, upload and export to hubs."""

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
from twinkle.hub.progress import Report
from twinkle_client.archives import AdapterUpload, ReportBytes, ignore_progress, upload_adapter
from twinkle_client.client import TwinkleClient, current_client
from twinkle_client.merging import MergedDownload, ignore_stages
from twinkle_client.rpc import LoopThread, remote_method
from twinkle_client.rpc.connection import new_id

FINAL_STATES = frozenset(
    {
        export_service_pb2.EXPORT_STATE_DONE,
        export_service_pb2.EXPORT_STATE_FAILED,
        export_service_pb2.EXPORT_STATE_CANCELLED,
    }
)
"""Final states of exports."""
_POLL_SECONDS = 1.0


class CheckpointLibrary:
    """Manages a tenant's checkpoints. `client` defaults to the client initialized last."""

    def __init__(self, *, client: TwinkleClient | None = None) -> None:
        self._connection = current_client(client).connection
        channel = self._connection.channel
        self._checkpoints = CheckpointServiceStub(channel)
        self._catalogue = CatalogueServiceStub(channel)
        self._exports = ExportServiceStub(channel)
        self._server = ServerServiceStub(channel)

    @property
    def loop_thread(self) -> LoopThread:
        """Event loop that runs the methods."""
        return self._connection.loop_thread

    @remote_method
    async def publish(self, path: str) -> None:
        """Make a checkpoint readable by every tenant.

        Raises:
            NotFoundError: There is no checkpoint at this path.
            ConflictError: Another tenant's public checkpoint has the same path.
        """
        request = catalogue_service_pb2.PublishCheckpointRequest(checkpoint_path=path)
        await self._connection.unary(self._catalogue.PublishCheckpoint, request)

    @remote_method
    async def unpublish(self, path: str) -> None:
        """Make a public checkpoint private again.

        Raises:
            NotFoundError: There is no checkpoint at this path.
        """
        request = catalogue_service_pb2.UnpublishCheckpointRequest(checkpoint_path=path)
        await self._connection.unary(self._catalogue.UnpublishCheckpoint, request)

    @remote_method
    async def set_ttl(self, path: str, ttl: timedelta | None) -> checkpoint_pb2.Checkpoint:
        """Set the time after which a checkpoint is deleted, counted from now; None disables the deletion.

        Raises:
            NotFoundError: There is no checkpoint at this path.
            UsageError: The time is shorter than one second or longer than 36,500 days.
        """
        request = checkpoint_service_pb2.SetCheckpointTtlRequest(checkpoint_path=path)
        if ttl is not None:
            request.ttl.FromTimedelta(ttl)
        return (await self._connection.unary(self._checkpoints.SetCheckpointTtl, request)).checkpoint

    @remote_method
    async def verify(self, path: str) -> checkpoint_pb2.Checkpoint:
        """Compare all files of a checkpoint with the digests stored when it was saved, and return the checkpoint.

        Raises:
            NotFoundError: There is no checkpoint at this path.
            ServerError: The checkpoint is damaged; the `reason` of the error is CHECKPOINT_DAMAGED.
        """
        request = checkpoint_service_pb2.VerifyCheckpointRequest(checkpoint_path=path)
        return (await self._connection.unary(self._checkpoints.VerifyCheckpoint, request)).checkpoint

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
        """Upload an adapter that peft or another tool saved; it becomes a checkpoint of a new run.

        An interrupted upload, even of an earlier program, resumes when the call is repeated.

        Args:
            source: Peft folder with safetensors, or a `.tar` or `.tar.gz` archive of such a folder.
            name: Name of the checkpoint.
            base_model: Base model of the adapter. Empty: the server's only trainable base model.
            user_metadata: Labels of the checkpoint.
            report: Callback with the number of sent bytes and the total.

        Raises:
            ValueError: The source is not a peft folder, or `base_model` is empty and the server does not have exactly
                one trainable base model.
            UsageError: The server refused the adapter; the message states the reason.
            QuotaError: The tenant's storage is full, or the tenant has too many unfinished uploads.
        """
        adapter = AdapterUpload(
            source=Path(source),
            name=name,
            base_model=base_model or await self._only_base_model(),
            user_metadata=dict(user_metadata or {}),
        )
        return await upload_adapter(self._connection, adapter, report=report)

    @remote_method
    async def download_merged(
        self,
        path: str,
        folder: str | Path,
        *,
        base: str | Path = '',
        dtype: str | None = None,
        report: Report = ignore_stages,
    ) -> Path:
        """Download a checkpoint and write it, merged into its base model, as a model folder for transformers.

        The base model is downloaded if it is not on this machine. The folder appears when it is complete, and a
        repeated call continues an interrupted one.

        Args:
            path: `twinkle://<run>/weights/<name>`.
            folder: Target folder. An earlier merged model is replaced; other content is refused.
            base: Id or folder of the base model. Empty: the base model that the checkpoint names.
            dtype: Type of the weights: 'bfloat16', 'float16' or 'float32'. Unset: the types of the base model.
            report: Callback with the stage, and the numbers of processed bytes and of all bytes.

        Returns:
            The folder.

        Raises:
            NotFoundError: There is no checkpoint at this path.
            ValueError: The base model is missing or has quantized weights, `dtype` is unknown, the folder has other
                content, or the checkpoint does not fit the base model.
            OSError: The disk has too little space, or failed.
        """
        download = MergedDownload(self._connection, await self._get(path), base=str(base), dtype=dtype, report=report)
        await download.run(Path(folder))
        return Path(folder)

    @remote_method
    async def download_gguf(
        self,
        path: str,
        file: str | Path,
        *,
        base: str | Path = '',
        dtype: str | None = None,
        report: Report = ignore_stages,
    ) -> Path:
        """Download and merge a checkpoint like `download_merged`, but write it as a GGUF file for llama.cpp.

        Llama, Qwen 2 and Qwen 3 are supported. The extra `data` is required.

        Args:
            path: See `download_merged`.
            file: Target file; an existing file is replaced.
            base: See `download_merged`.
            dtype: Type of the matrices: 'bfloat16', 'float16', 'float32' or 'q8_0'. Unset: the type of the base model.
            report: See `download_merged`.

        Returns:
            The file.

        Raises:
            NotFoundError, OSError: See `download_merged`.
            ValueError: See `download_merged`; also if the base model cannot be converted, or the extra `data` is not
                installed.
        """
        download = MergedDownload(self._connection, await self._get(path), base=str(base), dtype=dtype, report=report)
        await download.run_gguf(Path(file))
        return Path(file)

    @remote_method
    async def push(
        self, path: str, target: str, *, token: str = '', is_private: bool = True
    ) -> export_service_pb2.Export:
        """Start an export of a checkpoint to `hf://<owner>/<name>` or `file:///<folder>`.

        The server runs the export. Until it has ended, a repeated call with the same arguments returns the same export.

        Args:
            path: Path of the checkpoint.
            target: Hub repository, or folder below the operator's export folder.
            token: Token with write access to the hub, required for a hub and refused for a folder. The server stores
                the token encrypted until the export ends.
            is_private: Whether a new repository is private.

        Returns:
            The accepted export. `get_export` returns its progress, `wait_export` waits for its end.

        Raises:
            NotFoundError: There is no checkpoint at this path.
            UsageError: The target or the token is invalid.
            StateError: The gateway cannot export to the target.
            QuotaError: The tenant has too many unfinished exports.
        """
        request = export_service_pb2.StartExportRequest(
            request_id=new_id('ex'), checkpoint_path=path, target=target, hub_token=token, is_private=is_private
        )
        return (await self._connection.unary(self._exports.StartExport, request)).export

    @remote_method
    async def get_export(self, export_id: str) -> export_service_pb2.Export:
        """Return an export.

        Raises:
            NotFoundError: The export does not exist.
        """
        return await self._get_export(export_id)

    @remote_method
    async def wait_export(self, export_id: str, *, report: ReportBytes = ignore_progress) -> export_service_pb2.Export:
        """Wait until an export has finished, failed or been cancelled, and return it.

        Raises:
            NotFoundError: The export does not exist.
        """
        while True:
            export = await self._get_export(export_id)
            report(export.read_bytes, export.size_bytes)
            if export.state in FINAL_STATES:
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
        """Cancel an export, unless it is already in a final state, and return it.

        Raises:
            NotFoundError: The export does not exist.
        """
        request = export_service_pb2.CancelExportRequest(export_id=export_id)
        return (await self._connection.unary(self._exports.CancelExport, request)).export

    async def _get(self, path: str) -> checkpoint_pb2.Checkpoint:
        request = checkpoint_service_pb2.GetCheckpointRequest(checkpoint_path=path)
        return (await self._connection.unary(self._checkpoints.GetCheckpoint, request)).checkpoint

    async def _get_export(self, export_id: str) -> export_service_pb2.Export:
        request = export_service_pb2.GetExportRequest(export_id=export_id)
        return (await self._connection.unary(self._exports.GetExport, request)).export

    async def _only_base_model(self) -> str:
        info = await self._connection.unary(self._server.GetServerInfo, server_service_pb2.GetServerInfoRequest())
        models = {model.base_model for item in info.services for model in item.base_models if model.is_trainable}
        if len(models) != 1:
            known = ', '.join(sorted(models)) or 'none'
            raise ValueError(f'base_model is empty; pass one of the base models that the server trains: {known}')
        return models.pop()
