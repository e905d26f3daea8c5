"""Serves the contract for tenants, projects and keys. The authenticator lets administrators alone come here."""

from dataclasses import dataclass
from typing import Any

import grpc

from services.gateway import wire as convert
from services.gateway.keys.create_key import CreateKey
from services.gateway.keys.create_project import CreateProject
from services.gateway.keys.create_tenant import CreateTenant
from services.gateway.keys.list_keys import ListKeys
from services.gateway.keys.list_projects import ListProjects
from services.gateway.keys.list_tenants import ListTenants
from services.gateway.keys.revoke_key import RevokeKey
from services.gateway.keys.rotate_key import RotateKey
from services.kit.rpc.fields import id_from_proto
from twinkle.api.gateway.v1 import key_service_pb2 as messages
from twinkle.api.gateway.v1 import key_service_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, kw_only=True)
class KeyVerbs:
    """What administrators do."""

    create_tenant: CreateTenant
    list_tenants: ListTenants
    create_project: CreateProject
    list_projects: ListProjects
    create_key: CreateKey
    list_keys: ListKeys
    rotate_key: RotateKey
    revoke_key: RevokeKey


class KeyServicer(key_service_pb2_grpc.KeyServiceServicer):
    """Converts, calls the verb, converts."""

    def __init__(self, verbs: KeyVerbs) -> None:
        """Serve these verbs."""
        self._verbs = verbs

    async def CreateTenant(  # noqa: N802 (the contract's name)
        self, request: messages.CreateTenantRequest, context: Context
    ) -> messages.CreateTenantResponse:
        """Create a tenant."""
        tenant_id = convert.tenant_id_from_proto(request.tenant_id)
        display_name = convert.display_name_from_proto(request.display_name)
        tenant = await self._verbs.create_tenant(tenant_id, display_name=display_name)
        return messages.CreateTenantResponse(tenant=convert.tenant_to_proto(tenant))

    async def ListTenants(  # noqa: N802 (the contract's name)
        self, request: messages.ListTenantsRequest, context: Context
    ) -> messages.ListTenantsResponse:
        """List tenants."""
        query = ('ListTenants',)
        listing = await self._verbs.list_tenants(
            convert.page_from_proto(request.page_size, request.page_token, query=query)
        )
        return messages.ListTenantsResponse(
            tenants=map(convert.tenant_to_proto, listing.items),
            next_page_token=convert.next_token(listing.next_cursor, query=query),
        )

    async def CreateProject(  # noqa: N802 (the contract's name)
        self, request: messages.CreateProjectRequest, context: Context
    ) -> messages.CreateProjectResponse:
        """Create a project."""
        project = await self._verbs.create_project(
            convert.tenant_id_from_proto(request.tenant_id),
            convert.project_id_from_proto(request.project_id),
            display_name=convert.display_name_from_proto(request.display_name),
        )
        return messages.CreateProjectResponse(project=convert.project_to_proto(project))

    async def ListProjects(  # noqa: N802 (the contract's name)
        self, request: messages.ListProjectsRequest, context: Context
    ) -> messages.ListProjectsResponse:
        """List a tenant's projects."""
        query = ('ListProjects', convert.tenant_id_from_proto(request.tenant_id))
        page = convert.page_from_proto(request.page_size, request.page_token, query=query)
        listing = await self._verbs.list_projects(request.tenant_id, page)
        return messages.ListProjectsResponse(
            projects=map(convert.project_to_proto, listing.items),
            next_page_token=convert.next_token(listing.next_cursor, query=query),
        )

    async def CreateKey(  # noqa: N802 (the contract's name)
        self, request: messages.CreateKeyRequest, context: Context
    ) -> messages.CreateKeyResponse:
        """Create a key."""
        made = await self._verbs.create_key(convert.key_order_from_proto(request))
        return messages.CreateKeyResponse(key=convert.key_to_proto(made.key), secret=made.secret)

    async def ListKeys(  # noqa: N802 (the contract's name)
        self, request: messages.ListKeysRequest, context: Context
    ) -> messages.ListKeysResponse:
        """List a tenant's keys."""
        query = ('ListKeys', convert.tenant_id_from_proto(request.tenant_id))
        page = convert.page_from_proto(request.page_size, request.page_token, query=query)
        listing = await self._verbs.list_keys(request.tenant_id, page)
        return messages.ListKeysResponse(
            keys=map(convert.key_to_proto, listing.items),
            next_page_token=convert.next_token(listing.next_cursor, query=query),
        )

    async def RotateKey(  # noqa: N802 (the contract's name)
        self, request: messages.RotateKeyRequest, context: Context
    ) -> messages.RotateKeyResponse:
        """Replace a key."""
        key_id = id_from_proto(request.key_id, 'key_id')
        rotated = await self._verbs.rotate_key(key_id, overlap=convert.overlap_from_proto(request))
        return messages.RotateKeyResponse(
            key=convert.key_to_proto(rotated.new.key),
            secret=rotated.new.secret,
            replaced_key=convert.key_to_proto(rotated.old),
        )

    async def RevokeKey(  # noqa: N802 (the contract's name)
        self, request: messages.RevokeKeyRequest, context: Context
    ) -> messages.RevokeKeyResponse:
        """Revoke a key."""
        key = await self._verbs.revoke_key(id_from_proto(request.key_id, 'key_id'))
        return messages.RevokeKeyResponse(key=convert.key_to_proto(key))
