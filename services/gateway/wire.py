"""Between messages and values. Every input check of the gateway's own verbs is here."""

import json
import re
from collections.abc import Mapping
from datetime import datetime, timedelta

from google.protobuf.timestamp_pb2 import Timestamp

from services.gateway.catalogue.rules import Checkpoint, Run
from services.gateway.keys.api_key import ApiKey, Scope
from services.gateway.keys.create_key import KeyOrder
from services.gateway.keys.project import Project
from services.gateway.keys.rotate_key import DEFAULT_OVERLAP
from services.gateway.keys.tenant import Tenant
from services.gateway.paging import Cursor, Page
from services.gateway.sessions.create_session import SessionOrder
from services.gateway.sessions.session import FinishReason, Session, SessionState
from services.kit.errors import InvalidField, InvalidPageToken
from services.kit.paging import page_token_after, parse_page
from services.kit.rpc.fields import (
    LONGEST_TTL,
    MAX_ID_LENGTH,
    duration_from_proto,
    id_from_proto,
    text_from_proto,
    timestamp_to_proto,
    ttl_from_proto,
)
from twinkle.api.checkpoint.v1 import checkpoint_pb2
from twinkle.api.gateway.v1 import catalogue_service_pb2, key_service_pb2, session_service_pb2

MAX_LABEL_LENGTH = 256
MAX_LABELS = 64
MAX_LABEL_VALUE_LENGTH = 4096

_CHOSEN_ID = re.compile(r'[a-z0-9-]{1,64}')
_SCOPES: Mapping[key_service_pb2.Scope.ValueType, Scope] = {
    key_service_pb2.SCOPE_TRAIN: Scope.TRAIN,
    key_service_pb2.SCOPE_SAMPLE: Scope.SAMPLE,
    key_service_pb2.SCOPE_DATA: Scope.DATA,
    key_service_pb2.SCOPE_OPERATOR: Scope.OPERATOR,
    key_service_pb2.SCOPE_ADMIN: Scope.ADMIN,
}
_SCOPE_NUMBERS = {scope: number for number, scope in _SCOPES.items()}
_STATES: Mapping[SessionState, session_service_pb2.SessionState.ValueType] = {
    SessionState.ACTIVE: session_service_pb2.SESSION_STATE_ACTIVE,
    SessionState.FINISHED: session_service_pb2.SESSION_STATE_FINISHED,
    SessionState.EXPIRED: session_service_pb2.SESSION_STATE_EXPIRED,
}
_FINISH_REASONS: Mapping[session_service_pb2.FinishReason.ValueType, FinishReason] = {
    session_service_pb2.FINISH_REASON_UNSPECIFIED: FinishReason.SUCCESS,
    session_service_pb2.FINISH_REASON_SUCCESS: FinishReason.SUCCESS,
    session_service_pb2.FINISH_REASON_FAILED: FinishReason.FAILED,
    session_service_pb2.FINISH_REASON_INTERRUPTED: FinishReason.INTERRUPTED,
}


def tenant_id_from_proto(value: str) -> str:
    """Return the id of a tenant.

    Raises:
        InvalidField: it is not 1 to 64 of lower-case letters, digits and '-'.
    """
    return _chosen_id(value, 'tenant_id')


def project_id_from_proto(value: str) -> str:
    """Return the id of a project.

    Raises:
        InvalidField: it is not 1 to 64 of lower-case letters, digits and '-'.
    """
    return _chosen_id(value, 'project_id')


def display_name_from_proto(value: str) -> str:
    """Return a name for people.

    Raises:
        InvalidField: it is too long or holds a control character.
    """
    return text_from_proto(value, 'display_name', limit=MAX_LABEL_LENGTH)


def key_order_from_proto(request: key_service_pb2.CreateKeyRequest) -> KeyOrder:
    """Return what key is asked for.

    Raises:
        InvalidField: a field is missing or out of range.
    """
    if not request.scopes:
        raise InvalidField('scopes', 'is required; give at least one')
    for index, number in enumerate(request.scopes):
        if number not in _SCOPES:
            raise InvalidField(f'scopes[{index}]', f'must be one of {", ".join(scope.name for scope in Scope)}')
    return KeyOrder(
        tenant_id=tenant_id_from_proto(request.tenant_id),
        scopes=frozenset(_SCOPES[number] for number in request.scopes),
        display_name=display_name_from_proto(request.display_name),
        project_id=project_id_from_proto(request.project_id) if request.project_id else '',
        ttl=ttl_from_proto(request.ttl, 'ttl') if request.HasField('ttl') else None,
    )


def overlap_from_proto(request: key_service_pb2.RotateKeyRequest) -> timedelta:
    """Return how long a replaced key still works.

    Raises:
        InvalidField: it is out of range.
    """
    if not request.HasField('overlap'):
        return DEFAULT_OVERLAP
    return duration_from_proto(request.overlap, 'overlap', least=timedelta(), most=LONGEST_TTL)


def session_order_from_proto(request: session_service_pb2.CreateSessionRequest) -> SessionOrder:
    """Return what session is asked for.

    Raises:
        InvalidField: a field is missing or too long.
    """
    if len(request.user_metadata) > MAX_LABELS:
        raise InvalidField('user_metadata', f'has {len(request.user_metadata)} labels; at most {MAX_LABELS}')
    for name, value in request.user_metadata.items():
        text_from_proto(name, 'user_metadata', limit=MAX_LABEL_LENGTH)
        text_from_proto(value, f'user_metadata[{name}]', limit=MAX_LABEL_VALUE_LENGTH)
    return SessionOrder(
        request_id=id_from_proto(request.request_id, 'request_id'),
        client=text_from_proto(request.client, 'client', limit=MAX_LABEL_LENGTH),
        user_metadata=dict(request.user_metadata),
        project_id=project_id_from_proto(request.project_id) if request.project_id else '',
    )


def finish_reason_from_proto(reason: session_service_pb2.FinishReason.ValueType) -> FinishReason:
    """Return how a client ended.

    Raises:
        InvalidField: the contract has no such value.
    """
    if reason not in _FINISH_REASONS:
        raise InvalidField('reason', 'must be SUCCESS, FAILED or INTERRUPTED')
    return _FINISH_REASONS[reason]


def page_from_proto(page_size: int, page_token: str, *, query: tuple[str, ...]) -> Page:
    """Return the page asked for.

    Args:
        page_size: 0 means the default.
        page_token: empty, or from `next_token` for the same query.
        query: whatever else decides the list: its name, the tenant, the filters.

    Raises:
        InvalidField: the size is negative.
        InvalidPageToken: the token was not made for this query.
    """
    page = parse_page(page_size, page_token, query=json.dumps(query), key_types=(str, str))
    if page.after is None:
        return Page(size=page.size)
    try:
        moment, item_id = map(str, page.after)
        cursor = Cursor(datetime.fromisoformat(moment), text_from_proto(item_id, 'page_token', limit=MAX_ID_LENGTH))
        is_utc = cursor.create_time.utcoffset() == timedelta()
    except (ValueError, InvalidField) as error:
        raise InvalidPageToken() from error
    if not is_utc:
        raise InvalidPageToken()
    return Page(size=page.size, after=cursor)


def next_token(cursor: Cursor | None, *, query: tuple[str, ...]) -> str:
    """Return the token of the page after `cursor`; empty where there is none."""
    after = None if cursor is None else (cursor.create_time.isoformat(), cursor.item_id)
    return page_token_after(after, query=json.dumps(query))


def tenant_to_proto(tenant: Tenant) -> key_service_pb2.Tenant:
    """Return the message of a tenant."""
    return key_service_pb2.Tenant(
        tenant_id=tenant.tenant_id,
        display_name=tenant.display_name,
        create_time=_timestamp(tenant.create_time),
    )


def project_to_proto(project: Project) -> key_service_pb2.Project:
    """Return the message of a project."""
    return key_service_pb2.Project(
        tenant_id=project.tenant_id,
        project_id=project.project_id,
        display_name=project.display_name,
        create_time=_timestamp(project.create_time),
    )


def key_to_proto(key: ApiKey) -> key_service_pb2.ApiKey:
    """Return the message of a key, without its secret."""
    return key_service_pb2.ApiKey(
        key_id=key.key_id,
        tenant_id=key.tenant_id,
        scopes=sorted(_SCOPE_NUMBERS[scope] for scope in key.scopes),
        display_name=key.display_name,
        create_time=_timestamp(key.create_time),
        expire_time=_timestamp(key.expire_time),
        revoke_time=_timestamp(key.revoke_time),
        project_id=key.project_id,
        replaces_key_id=key.replaces_key_id,
        retire_time=_timestamp(key.retire_time),
    )


def session_to_proto(session: Session) -> session_service_pb2.Session:
    """Return the message of a session."""
    return session_service_pb2.Session(
        session_id=session.session_id,
        state=_STATES[session.state],
        client=session.client,
        user_metadata=session.user_metadata,
        create_time=_timestamp(session.create_time),
        heartbeat_time=_timestamp(session.heartbeat_time),
        project_id=session.project_id,
        checkpoint_paths=session.checkpoint_paths,
    )


def run_to_proto(run: Run) -> catalogue_service_pb2.Run:
    """Return the message of a run."""
    return catalogue_service_pb2.Run(
        run_id=run.run_id,
        base_model=run.base_model,
        lora_rank=run.lora_rank,
        step_count=run.step_count,
        version=run.version,
        user_metadata=run.user_metadata,
        is_active=run.is_active,
        create_time=_timestamp(run.create_time),
        update_time=_timestamp(run.update_time),
    )


def checkpoint_to_proto(checkpoint: Checkpoint) -> checkpoint_pb2.Checkpoint:
    """Return the message of a checkpoint."""
    return checkpoint_pb2.Checkpoint(
        checkpoint_id=checkpoint.checkpoint_id,
        adapter_id=checkpoint.run_id,
        name=checkpoint.name,
        path=checkpoint.path,
        base_model=checkpoint.base_model,
        is_optimizer_included=checkpoint.is_optimizer_included,
        size_bytes=checkpoint.size_bytes,
        step_count=checkpoint.step_count,
        digest=checkpoint.digest,
        folder=checkpoint.folder,
        create_time=_timestamp(checkpoint.create_time),
        expire_time=_timestamp(checkpoint.expire_time),
        is_public=checkpoint.is_public,
        user_metadata=checkpoint.user_metadata,
        lora_rank=checkpoint.lora_rank,
    )


def _chosen_id(value: str, field: str) -> str:
    if not _CHOSEN_ID.fullmatch(value):
        raise InvalidField(field, "must be 1 to 64 of lower-case letters, digits and '-'")
    return value


def _timestamp(moment: datetime | None) -> Timestamp | None:
    return None if moment is None else timestamp_to_proto(moment)
