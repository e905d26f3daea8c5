"""Runs, checkpoints and sessions as JSON documents."""

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from services.gateway.catalogue.rules import Checkpoint, Run
from services.gateway.paging import Counted, Slice
from services.gateway.sessions.rules import FinishReason, Session, SessionState
from services.gateway.tinker.paths import WeightsKind, path_of_native

OWN_LABELS = {'display_name': 'tinker:display_name', 'tags': 'tinker:tags'}
"""Labels of a session that store fields for which we have none."""
_TYPES = {WeightsKind.TRAINING: 'training', WeightsKind.SAMPLER: 'sampler', WeightsKind.EXTERNAL: 'external'}
_REASONS = {
    FinishReason.SUCCESS: 'success',
    FinishReason.FAILED: 'errored',
    FinishReason.INTERRUPTED: 'interrupted',
}


def run_to_json(run: Run, checkpoints: Iterable[Checkpoint]) -> dict[str, Any]:
    """Return a run; `checkpoints` are those of the run, newest first."""
    newest: dict[WeightsKind, Checkpoint] = {}
    for checkpoint in checkpoints:
        newest.setdefault(path_of_native(checkpoint.path).kind, checkpoint)
    last, last_sampler = newest.get(WeightsKind.TRAINING), newest.get(WeightsKind.SAMPLER)
    return {
        'training_run_id': run.run_id,
        'base_model': run.base_model,
        'model_owner': run.tenant_id,
        'is_lora': run.lora_rank > 0,
        'corrupted': False,
        'lora_rank': run.lora_rank or None,
        'last_request_time': time_to_json(run.update_time),
        'last_checkpoint': checkpoint_to_json(last) if last else None,
        'last_sampler_checkpoint': checkpoint_to_json(last_sampler) if last_sampler else None,
        'user_metadata': labels_to_json(run.user_metadata),
    }


def checkpoint_to_json(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return a checkpoint."""
    path = path_of_native(checkpoint.path)
    return {
        'checkpoint_id': path.checkpoint_id,
        'checkpoint_type': _TYPES[path.kind],
        'time': time_to_json(checkpoint.create_time),
        'tinker_path': str(path),
        'size_bytes': checkpoint.size_bytes,
        'public': checkpoint.is_public,
        'expires_at': time_to_json(checkpoint.expire_time),
        'user_metadata': labels_to_json(checkpoint.user_metadata),
    }


def cursor_to_json(part: Slice, found: Counted[Any]) -> dict[str, int]:
    """Return the position of a response in its list."""
    return {'offset': part.offset, 'limit': part.limit, 'total_count': found.total_count}


def session_to_json(session: Session, *, stored: tuple[int, int]) -> dict[str, Any]:
    """Return a found session; `stored` are the number and bytes of its checkpoints."""
    return {
        'session_id': session.session_id,
        'created_at': time_to_json(session.create_time),
        'owner': session.tenant_id,
        'project_id': session.project_id,
        'status': _status(session),
        'checkpoints_count': stored[0],
        'checkpoint_storage_bytes': stored[1],
        'display_name': own_label(session, 'display_name') or None,
        'user_metadata': labels_to_json(session.user_metadata),
    }


def status_kind(session: Session) -> str:
    """Return the kind of a session's status; empty for an expired session."""
    kinds = {SessionState.ACTIVE: 'active', SessionState.FINISHED: 'client_finished'}
    return kinds.get(session.state, '')


def finish_kind(session: Session) -> str:
    """Return how the client finished a session."""
    return _REASONS[session.finish_reason or FinishReason.SUCCESS]


def own_label(session: Session, name: str) -> str:
    """Return a field of `OWN_LABELS`; empty if the client did not send it."""
    return session.user_metadata.get(OWN_LABELS[name], '')


def labels_to_json(labels: Mapping[str, str]) -> dict[str, str] | None:
    """Return the labels that the client chose; None if there are none."""
    return {name: value for name, value in labels.items() if not name.startswith('tinker:')} or None


def time_to_json(time: datetime | None) -> str | None:
    """Return a time in ISO 8601."""
    return None if time is None else time.isoformat()


def _status(session: Session) -> dict[str, Any] | None:
    kind = status_kind(session)
    if kind == 'client_finished':
        return {'type': kind, 'reason': {'type': finish_kind(session)}}
    return {'type': kind} if kind else None
