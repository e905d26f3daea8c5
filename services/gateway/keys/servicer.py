"""Serves the contract for tenants, projects and keys. The authenticator admits only keys with the scope `admin`.

Functions raise InvalidField if a field is missing, malformed or out of range.
"""

# ruff: noqa: N802 (the methods have the contract's names)

import re
from collections.abc import Mapping
from datetime import timedelta

from twinkle.api.gateway.v1 import key_service_pb2 as messages
from twinkle.api.gateway.v1 import key_service_pb2_grpc
from twinkle_services.gateway.credentials import Scope
from twinkle_services.gateway.keys.keys import Keys
from twinkle_services.gateway.keys.rules import DEFAULT_OVERLAP, ApiKey, KeyRequest, Project, Tenant
from twinkle_services.gateway.keys.tenants import Projects, Tenants
from twinkle_services.gateway.page_tokens import next_token, page_from_proto
from twinkle_services.kit.errors import InvalidField
from twinkle_services.kit.rpc.call import Context
from twinkle_services.kit.rpc.fields import (
    MAX_TTL,
    duration_from_proto,
    id_from_proto,
    text_from_proto,
    timestamp_to_proto,
    ttl_from_proto,
)

MAX_NAME_LENGTH = 256
"""Maximum number of characters of a display name."""
_CHOSEN_ID = re.compile(r'[a-z0-9-]{1,64}')
_SCOPES: Mapping[messages.Scope.ValueType, Scope] = {
    messages.SCOPE_TRAIN: Scope.TRAIN,
    messages.SCOPE_SAMPLE: Scope.SAMPLE,
    messages.SCOPE_DATA: Scope.DATA,
    messages.SCOPE_OPERATOR: Scope.OPERATOR,
    messages.SCOPE_ADMIN: Scope.ADMIN,
    messages.SCOPE_FULL_PARAMETERS: Scope.FULL_PARAMETERS,
}
_SCOPE_NUMBERS = {scope: number for number, scope in _SCOPES.items()}


class KeyServicer(key_service_pb2_grpc.KeyServiceServicer):
    """Implements `KeyService`."""

    def __init__(self, tenants: Tenants, projects: Projects, keys: Keys) -> None:
        self._tenants = tenants
        self._projects = projects
        self._keys = keys

    async def CreateTenant(
        self, request: messages.CreateTenantRequest, context: Context
    ) -> messages.CreateTenantResponse:
        tenant_id = tenant_id_from_proto(request.tenant_id)
        display_name = display_name_from_proto(request.display_name)
        tenant = await self._tenants.create(tenant_id, display_name=display_name)
        return messages.CreateTenantResponse(tenant=tenant_to_proto(tenant))

    async def ListTenants(self, request: messages.ListTenantsRequest, context: Context) -> messages.ListTenantsResponse:
        query = ('ListTenants',)
        listing = await self._tenants.list(page_from_proto(request.page_size, request.page_token, query=query))
        return messages.ListTenantsResponse(
            tenants=map(tenant_to_proto, listing.items), next_page_token=next_token(listing.next_cursor, query=query)
        )

    async def CreateProject(
        self, request: messages.CreateProjectRequest, context: Context
    ) -> messages.CreateProjectResponse:
        project = await self._projects.create(
            tenant_id_from_proto(request.tenant_id),
            project_id_from_proto(request.project_id),
            display_name=display_name_from_proto(request.display_name),
        )
        return messages.CreateProjectResponse(project=project_to_proto(project))

    async def ListProjects(
        self, request: messages.ListProjectsRequest, context: Context
    ) -> messages.ListProjectsResponse:
        query = ('ListProjects', tenant_id_from_proto(request.tenant_id))
        page = page_from_proto(request.page_size, request.page_token, query=query)
        listing = await self._projects.list(request.tenant_id, page)
        return messages.ListProjectsResponse(
            projects=map(project_to_proto, listing.items), next_page_token=next_token(listing.next_cursor, query=query)
        )

    async def CreateKey(self, request: messages.CreateKeyRequest, context: Context) -> messages.CreateKeyResponse:
        issued = await self._keys.create(key_request_from_proto(request))
        return messages.CreateKeyResponse(key=key_to_proto(issued.key), secret=issued.secret)

    async def ListKeys(self, request: messages.ListKeysRequest, context: Context) -> messages.ListKeysResponse:
        query = ('ListKeys', tenant_id_from_proto(request.tenant_id))
        page = page_from_proto(request.page_size, request.page_token, query=query)
        listing = await self._keys.list(request.tenant_id, page)
        return messages.ListKeysResponse(
            keys=map(key_to_proto, listing.items), next_page_token=next_token(listing.next_cursor, query=query)
        )

    async def RotateKey(self, request: messages.RotateKeyRequest, context: Context) -> messages.RotateKeyResponse:
        key_id = id_from_proto(request.key_id, 'key_id')
        issued = await self._keys.rotate(key_id, overlap=overlap_from_proto(request))
        replaced = None if issued.replaced is None else key_to_proto(issued.replaced)
        return messages.RotateKeyResponse(key=key_to_proto(issued.key), secret=issued.secret, replaced_key=replaced)

    async def RevokeKey(self, request: messages.RevokeKeyRequest, context: Context) -> messages.RevokeKeyResponse:
        key = await self._keys.revoke(id_from_proto(request.key_id, 'key_id'))
        return messages.RevokeKeyResponse(key=key_to_proto(key))


def tenant_id_from_proto(value: str) -> str:
    return _chosen_id(value, 'tenant_id')


def project_id_from_proto(value: str) -> str:
    return _chosen_id(value, 'project_id')


def display_name_from_proto(value: str) -> str:
    return text_from_proto(value, 'display_name', limit=MAX_NAME_LENGTH)


def key_request_from_proto(request: messages.CreateKeyRequest) -> KeyRequest:
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
    """Return the time for which the replaced key stays valid, at most `MAX_TTL`."""
    if not request.HasField('overlap'):
        return DEFAULT_OVERLAP
    return duration_from_proto(request.overlap, 'overlap', minimum=timedelta(), maximum=MAX_TTL)


def tenant_to_proto(tenant: Tenant) -> messages.Tenant:
    return messages.Tenant(
        tenant_id=tenant.tenant_id, display_name=tenant.display_name, create_time=timestamp_to_proto(tenant.create_time)
    )


def project_to_proto(project: Project) -> messages.Project:
    return messages.Project(
        tenant_id=project.tenant_id,
        project_id=project.project_id,
        display_name=project.display_name,
        create_time=timestamp_to_proto(project.create_time),
    )


def key_to_proto(key: ApiKey) -> messages.ApiKey:
    """Return the message of a key, without its secret."""
    end_times = {'expire_time': key.expire_time, 'revoke_time': key.revoke_time, 'retire_time': key.retire_time}
    return messages.ApiKey(
        key_id=key.key_id,
        tenant_id=key.tenant_id,
        scopes=sorted(_SCOPE_NUMBERS[scope] for scope in key.scopes),
        display_name=key.display_name,
        create_time=timestamp_to_proto(key.create_time),
        project_id=key.project_id,
        replaces_key_id=key.replaces_key_id,
        **{name: timestamp_to_proto(moment) for name, moment in end_times.items() if moment is not None},
    )


def _chosen_id(value: str, field: str) -> str:
    if not _CHOSEN_ID.fullmatch(value):
        raise InvalidField(field, "must be 1 to 64 lower-case letters, digits and '-'")
    return value
