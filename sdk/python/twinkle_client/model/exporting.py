"""Exports of checkpoints to hubs or folders, which the server runs in the background."""

import os

import grpc

from twinkle.api.error.v1 import error_reason_pb2
from twinkle.api.gateway.v1 import export_service_pb2
from twinkle_client.checkpoints import CheckpointLibrary
from twinkle_client.convert.sampling import SCHEME
from twinkle_client.errors import CancelledError, Error, ErrorFacts, RetryableError, StateError
from twinkle_client.model.handle import ModelHandle
from twinkle_client.progress import byte_progress
from twinkle_client.rpc import remote_method
from twinkle_client.rpc.remote_methods import IS_BLOCKING

_TARGETS = ('hf://', 'ms://', 'file:///')
_RETRYABLE = error_reason_pb2.ERROR_REASON_SERVICE_UNREACHABLE


class ExportingVerbs(ModelHandle):
    """Methods that export checkpoints."""

    @remote_method
    async def upload_to_hub(
        self,
        checkpoint_dir: str,
        hub_model_id: str,
        hub_token: str | None = None,
        async_upload: bool = True,  # noqa: FBT001, FBT002 - an established positional parameter
        *,
        adapter_name: str | None = None,
    ) -> export_service_pb2.Export:
        """Upload a checkpoint's weights and configuration, as a peft folder, to a hub or to a folder of the server.

        The server runs the export, which continues when this program exits, survives restarts of the server, and is
        retried while the hub is unavailable. `CheckpointLibrary` reports the progress of an export (`get_export`),
        waits for its end (`wait_export`) and cancels it (`cancel_export`).

        Args:
            checkpoint_dir: Path of the checkpoint, `twinkle://<run>/weights/<name>`, as returned by `save`; or the
                name of a checkpoint of the adapter's run.
            hub_model_id: `hf://<owner>/<name>`, where a new repository is private; or `file:///<folder>`, a folder
                below the operator's export folder.
            hub_token: Token with write access to the hub. Unset: `HF_TOKEN`. The server stores the token
                encrypted until the export ends.
            async_upload: Return as soon as the server has accepted the export. False: wait until the export ends, with
                a progress bar on a terminal; an interrupt does not cancel the export.
            adapter_name: Adapter of a checkpoint given by name. Unset: the only adapter.

        Returns:
            The export with its `export_id` and `state`, and with its `url` after waiting.

        Raises:
            ValueError: `hub_model_id` or `checkpoint_dir` is malformed, or there is no token.
            NotFoundError: There is no checkpoint at this path.
            QuotaError: The tenant has too many unfinished exports.
            StateError: The hub is ModelScope, no export folder is configured, or the export failed while waiting.
            RetryableError: The hub stayed unavailable while waiting.
            CancelledError: The export was cancelled while waiting.
        """
        _check(checkpoint_dir, hub_model_id)
        path = checkpoint_dir
        if not path.startswith(SCHEME):
            path = f'{SCHEME}{self._adapter(adapter_name).adapter_id}/weights/{checkpoint_dir}'
        library = CheckpointLibrary(client=self._client)
        export = await library.push.aio(path, hub_model_id, token=_token(hub_model_id, hub_token))
        if async_upload:
            return export
        with byte_progress(f'upload to {hub_model_id}', is_shown=IS_BLOCKING.get()) as report:
            export = await library.wait_export.aio(export.export_id, report=report)
        if export.state != export_service_pb2.EXPORT_STATE_DONE:
            raise _error_of(export)
        return export


def _check(checkpoint_dir: str, hub_model_id: str) -> None:
    if not hub_model_id.startswith(_TARGETS):
        raise ValueError(f'hub_model_id must be hf://<owner>/<name> or file:///<folder>, got {hub_model_id!r}')
    if not checkpoint_dir or ('/' in checkpoint_dir and not checkpoint_dir.startswith(SCHEME)):
        raise ValueError(
            f'checkpoint_dir must be the {SCHEME} path or the name of a checkpoint, got {checkpoint_dir!r}; '
            'use CheckpointLibrary().upload for a local folder'
        )


def _token(hub_model_id: str, hub_token: str | None) -> str:
    if not hub_model_id.startswith('hf://'):
        return hub_token or ''
    token = hub_token or os.environ.get('HF_TOKEN', '')
    if not token:
        raise ValueError(f'{hub_model_id} needs a token; pass hub_token or set HF_TOKEN')
    return token


def _error_of(export: export_service_pb2.Export) -> Error:
    """Return the error of a failed or cancelled export."""
    metadata = {'exportId': export.export_id}
    if export.state == export_service_pb2.EXPORT_STATE_CANCELLED:
        message = f'the export {export.export_id} was cancelled'
        return CancelledError(ErrorFacts(code=grpc.StatusCode.CANCELLED, message=message, metadata=metadata))
    failure = export.failure
    kind, code = StateError, grpc.StatusCode.FAILED_PRECONDITION
    if failure.reason == _RETRYABLE:
        kind, code = RetryableError, grpc.StatusCode.UNAVAILABLE
    reason = error_reason_pb2.ErrorReason.Name(failure.reason).removeprefix('ERROR_REASON_')
    message = failure.message or f'the export {export.export_id} failed'
    return kind(ErrorFacts(code=code, message=message, reason=reason, metadata=metadata))
