"""Serves the contract for tenants, projects and keys. The authenticator admits only keys with the scope `admin`."""

# ruff: noqa: N802 (the methods have the contract's names)

from typing import Any

import grpc

from services.gateway.keys import convert
from services.gateway.keys.keys import Keys
from services.gateway.keys.tenants import Projects, Tenants
from services.gateway.page_tokens import next_token, page_from_proto
from services.kit.rpc.fields import id_from_proto
from twinkle.api.gateway.v1 import key_service_pb2 as messages
from twinkle.api.gateway.v1 import key_service_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class KeyServicer(key_service_pb2_grpc.KeyServiceServicer):
    """Implements `KeyService`."""

    def __init__(self, tenants: Tenants, projects: Projects, keys: Keys) -> None:
        self._tenants = tenants
        self._projects = projects
        self._keys = keys

    async def CreateTenant(
        self, request: messages.CreateTenantRequest, context: Context
    ) -> messages.CreateTenantResponse:
        tenant_id = convert.tenant_id_from_proto(request.tenant_id)
        display_name = convert.display_name_from_proto(request.display_name)
        tenant = await self._tenants.create(tenant_id, display_name=display_name)
        return messages.CreateTenantResponse(tenant=convert.tenant_to_proto(tenant))

    async def ListTenants(self, request: messages.ListTenantsRequest, context: Context) -> messages.ListTenantsResponse:
        query = ('ListTenants',)
        listing = await self._tenants.list(page_from_proto(request.page_size, request.page_token, query=query))
        return messages.ListTenantsResponse(
            tenants=map(convert.tenant_to_proto, listing.items),
            next_page_token=next_token(listing.next_cursor, query=query),
        )

    async def CreateProject(
        self, request: messages.CreateProjectRequest, context: Context
    ) -> messages.CreateProjectResponse:
        project = await self._projects.create(
            convert.tenant_id_from_proto(request.tenant_id),
            convert.project_id_from_proto(request.project_id),
            display_name=convert.display_name_from_proto(request.display_name),
        )
        return messages.CreateProjectResponse(project=convert.project_to_proto(project))

    async def ListProjects(
        self, request: messages.ListProjectsRequest, context: Context
    ) -> messages.ListProjectsResponse:
        query = ('ListProjects', convert.tenant_id_from_proto(request.tenant_id))
        page = page_from_proto(request.page_size, request.page_token, query=query)
        listing = await self._projects.list(request.tenant_id, page)
        return messages.ListProjectsResponse(
            projects=map(convert.project_to_proto, listing.items),
            next_page_token=next_token(listing.next_cursor, query=query),
        )

    async def CreateKey(self, request: messages.CreateKeyRequest, context: Context) -> messages.CreateKeyResponse:
        issued = await self._keys.create(convert.key_request_from_proto(request))
        return messages.CreateKeyResponse(key=convert.key_to_proto(issued.key), secret=issued.secret)

    async def ListKeys(self, request: messages.ListKeysRequest, context: Context) -> messages.ListKeysResponse:
        query = ('ListKeys', convert.tenant_id_from_proto(request.tenant_id))
        page = page_from_proto(request.page_size, request.page_token, query=query)
        listing = await self._keys.list(request.tenant_id, page)
        return messages.ListKeysResponse(
            keys=map(convert.key_to_proto, listing.items),
            next_page_token=next_token(listing.next_cursor, query=query),
        )

    async def RotateKey(self, request: messages.RotateKeyRequest, context: Context) -> messages.RotateKeyResponse:
        key_id = id_from_proto(request.key_id, 'key_id')
        rotated = await self._keys.rotate(key_id, overlap=convert.overlap_from_proto(request))
        return messages.RotateKeyResponse(
            key=convert.key_to_proto(rotated.new.key),
            secret=rotated.new.secret,
            replaced_key=convert.key_to_proto(rotated.old),
        )

    async def RevokeKey(self, request: messages.RevokeKeyRequest, context: Context) -> messages.RevokeKeyResponse:
        key = await self._keys.revoke(id_from_proto(request.key_id, 'key_id'))
        return messages.RevokeKeyResponse(key=convert.key_to_proto(key))
