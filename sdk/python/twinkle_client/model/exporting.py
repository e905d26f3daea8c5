"""Checkpoints to hubs: the server sends them, in the background."""

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
from twinkle_client.rpc.faces import IS_BLOCKING

_TARGETS = ('hf://', 'ms://', 'file:///')
_RETRYABLE = error_reason_pb2.ERROR_REASON_SERVICE_UNREACHABLE


class ExportingVerbs(ModelHandle):
    """They take `adapter_name` too."""

    @remote_method
    async def upload_to_hub(
        self,
        checkpoint_dir: str,
        hub_model_id: str,
        hub_token: str | None = None,
        async_upload: bool = True,  # noqa: FBT001, FBT002 - an established name and place
        *,
        adapter_name: str | None = None,
    ) -> export_service_pb2.Export:
        """Have the server send a checkpoint to a hub: its weights and configuration, as a peft folder.

        It goes on when this program ends, survives restarts of the server, and is tried again while the hub does
        not answer. `CheckpointLibrary` tells how far it is (`get_export`), waits (`wait_export`) and cancels.

        Args:
            checkpoint_dir: its path, `twinkle://<run>/weights/<name>`, which `save` returned; or its name in the
                adapter's run.
            hub_model_id: `hf://<owner>/<name>`, where a repository that is made is private; or `file:///<folder>`
                below the folder that the operator has set aside for exports.
            hub_token: of someone who may write to the hub. Unset: `HF_TOKEN`. The server keeps it encrypted until
                the export is over.
            async_upload: return once the server has accepted it. False: wait for its end, with a bar on a terminal;
                an interrupt ends the waiting, not the export.
            adapter_name: unset: the only adapter, if `checkpoint_dir` is a name.

        Returns:
            The export, with its `export_id` and `state`; where it was waited for, with its `url`.

        Raises:
            ValueError: `hub_model_id` says no such place, there is no token, or `checkpoint_dir` is no checkpoint.
            NotFoundError: there is no checkpoint at that path.
            StateError: the hub is ModelScope, or the operator has set no folder aside; or it was waited for, and it
                failed; the message says why.
            RetryableError: it was waited for, and the hub did not answer, again and again.
            CancelledError: it was waited for, and somebody cancelled it.
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
            f'checkpoint_dir must be the {SCHEME} path of a checkpoint, or its name, got {checkpoint_dir!r}; '
            'a folder of this machine becomes a checkpoint by CheckpointLibrary().upload'
        )


def _token(hub_model_id: str, hub_token: str | None) -> str:
    if not hub_model_id.startswith('hf://'):
        return hub_token or ''
    token = hub_token or os.environ.get('HF_TOKEN', '')
    if not token:
        raise ValueError(f'hub_token is needed for {hub_model_id}: give it, or set HF_TOKEN')
    return token


def _error_of(export: export_service_pb2.Export) -> Error:
    """Return the error of an export that ended without being done."""
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
