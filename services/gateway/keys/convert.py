"""Converts messages of the key contract, with every check of their fields."""

import re
from collections.abc import Mapping
from datetime import timedelta

from services.gateway.credentials import Scope
from services.gateway.keys.rules import DEFAULT_OVERLAP, ApiKey, KeyRequest, Project, Tenant
from services.kit.errors import InvalidField
from services.kit.rpc.fields import (
    LONGEST_TTL,
    duration_from_proto,
    text_from_proto,
    timestamp_to_proto,
    ttl_from_proto,
)
from twinkle.api.gateway.v1 import key_service_pb2 as messages

MAX_NAME_LENGTH = 256
"""Largest number of characters of a display name."""

_CHOSEN_ID = re.compile(r'[a-z0-9-]{1,64}')
_SCOPES: Mapping[messages.Scope.ValueType, Scope] = {
    messages.SCOPE_TRAIN: Scope.TRAIN,
    messages.SCOPE_SAMPLE: Scope.SAMPLE,
    messages.SCOPE_DATA: Scope.DATA,
    messages.SCOPE_OPERATOR: Scope.OPERATOR,
    messages.SCOPE_ADMIN: Scope.ADMIN,
}
_SCOPE_NUMBERS = {scope: number for number, scope in _SCOPES.items()}


def tenant_id_from_proto(value: str) -> str:
    """Return a tenant id.

    Raises:
        InvalidField: the id is not 1 to 64 lower-case letters, digits and '-'.
    """
    return _chosen_id(value, 'tenant_id')


def project_id_from_proto(value: str) -> str:
    """Return a project id.

    Raises:
        InvalidField: the id is not 1 to 64 lower-case letters, digits and '-'.
    """
    return _chosen_id(value, 'project_id')


def display_name_from_proto(value: str) -> str:
    """Return a display name.

    Raises:
        InvalidField: the name is too long or has a control character.
    """
    return text_from_proto(value, 'display_name', limit=MAX_NAME_LENGTH)


def key_request_from_proto(request: messages.CreateKeyRequest) -> KeyRequest:
    """Return the request for a key.

    Raises:
        InvalidField: a field is missing or out of range.
    """
    if not request.scopes:
        raise InvalidField('scopes', 'is required; give at least one')
    for index, number in enumerate(request.scopes):
        if number not in _SCOPES:
            raise InvalidField(f'scopes[{index}]', f'must be one of {", ".join(scope.name for scope in Scope)}')
    return KeyRequest(
        tenant_id=tenant_id_from_proto(request.tenant_id),
        scopes=frozenset(_SCOPES[number] for number in request.scopes),
        display_name=display_name_from_proto(request.display_name),
        project_id=project_id_from_proto(request.project_id) if request.project_id else '',
        ttl=ttl_from_proto(request.ttl, 'ttl') if request.HasField('ttl') else None,
    )


def overlap_from_proto(request: messages.RotateKeyRequest) -> timedelta:
    """Return the time for which the replaced key stays valid.

    Raises:
        InvalidField: the overlap is out of range.
    """
    if not request.HasField('overlap'):
        return DEFAULT_OVERLAP
    return duration_from_proto(request.overlap, 'overlap', least=timedelta(), most=LONGEST_TTL)


def tenant_to_proto(tenant: Tenant) -> messages.Tenant:
    """Return the message of a tenant."""
    return messages.Tenant(
        tenant_id=tenant.tenant_id,
        display_name=tenant.display_name,
        create_time=timestamp_to_proto(tenant.create_time),
    )


def project_to_proto(project: Project) -> messages.Project:
    """Return the message of a project."""
    return messages.Project(
        tenant_id=project.tenant_id,
        project_id=project.project_id,
        display_name=project.display_name,
        create_time=timestamp_to_proto(project.create_time),
    )


def key_to_proto(key: ApiKey) -> messages.ApiKey:
    """Return the message of a key, without its secret."""
    ends = {'expire_time': key.expire_time, 'revoke_time': key.revoke_time, 'retire_time': key.retire_time}
    return messages.ApiKey(
        key_id=key.key_id,
        tenant_id=key.tenant_id,
        scopes=sorted(_SCOPE_NUMBERS[scope] for scope in key.scopes),
        display_name=key.display_name,
        create_time=timestamp_to_proto(key.create_time),
        project_id=key.project_id,
        replaces_key_id=key.replaces_key_id,
        **{name: timestamp_to_proto(moment) for name, moment in ends.items() if moment is not None},
    )


def _chosen_id(value: str, field: str) -> str:
    if not _CHOSEN_ID.fullmatch(value):
        raise InvalidField(field, "must be 1 to 64 of lower-case letters, digits and '-'")
    return value
