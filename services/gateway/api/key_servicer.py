"""Serves the contract for tenants and keys. The authenticator lets administrators alone come here."""

from typing import Any

import grpc

from services.gateway.api import convert
from services.gateway.application.create_key import CreateKey
from services.gateway.application.create_tenant import CreateTenant
from services.gateway.application.list_keys import ListKeys
from services.gateway.application.list_tenants import ListTenants
from services.gateway.application.revoke_key import RevokeKey
from services.kit.rpc.fields import id_from_proto
from twinkle.api.gateway.v1 import key_service_pb2 as messages
from twinkle.api.gateway.v1 import key_service_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class KeyServicer(key_service_pb2_grpc.KeyServiceServicer):
    """Converts, calls the verb, converts."""

    def __init__(
        self,
        *,
        create_tenant: CreateTenant,
        list_tenants: ListTenants,
        create_key: CreateKey,
        list_keys: ListKeys,
        revoke_key: RevokeKey,
    ) -> None:
        """Serve these verbs."""
        self._create_tenant = create_tenant
        self._list_tenants = list_tenants
        self._create_key = create_key
        self._list_keys = list_keys
        self._revoke_key = revoke_key

    async def CreateTenant(  # noqa: N802 (the contract's name)
        self, request: messages.CreateTenantRequest, context: Context
    ) -> messages.CreateTenantResponse:
        """Create a tenant."""
        tenant_id = convert.tenant_id_from_proto(request.tenant_id)
        display_name = convert.display_name_from_proto(request.display_name)
        tenant = await self._create_tenant(tenant_id, display_name=display_name)
        return messages.CreateTenantResponse(tenant=convert.tenant_to_proto(tenant))

    async def ListTenants(  # noqa: N802 (the contract's name)
        self, request: messages.ListTenantsRequest, context: Context
    ) -> messages.ListTenantsResponse:
        """List tenants."""
        query = ('ListTenants',)
        listing = await self._list_tenants(convert.page_from_proto(request.page_size, request.page_token, query=query))
        return messages.ListTenantsResponse(
            tenants=map(convert.tenant_to_proto, listing.items),
            next_page_token=convert.next_token(listing.next_cursor, query=query),
        )

    async def CreateKey(  # noqa: N802 (the contract's name)
        self, request: messages.CreateKeyRequest, context: Context
    ) -> messages.CreateKeyResponse:
        """Create a key."""
        made = await self._create_key(convert.key_order_from_proto(request))
        return messages.CreateKeyResponse(key=convert.key_to_proto(made.key), secret=made.secret)

    async def ListKeys(  # noqa: N802 (the contract's name)
        self, request: messages.ListKeysRequest, context: Context
    ) -> messages.ListKeysResponse:
        """List a tenant's keys."""
        query = ('ListKeys', convert.tenant_id_from_proto(request.tenant_id))
        page = convert.page_from_proto(request.page_size, request.page_token, query=query)
        listing = await self._list_keys(request.tenant_id, page)
        return messages.ListKeysResponse(
            keys=map(convert.key_to_proto, listing.items),
            next_page_token=convert.next_token(listing.next_cursor, query=query),
        )

    async def RevokeKey(  # noqa: N802 (the contract's name)
        self, request: messages.RevokeKeyRequest, context: Context
    ) -> messages.RevokeKeyResponse:
        """Revoke a key."""
        key = await self._revoke_key(id_from_proto(request.key_id, 'key_id'))
        return messages.RevokeKeyResponse(key=convert.key_to_proto(key))
