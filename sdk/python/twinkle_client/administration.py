"""Administration of tenants, projects and API keys."""

from collections.abc import Sequence
from datetime import timedelta

from twinkle.api.gateway.v1 import key_service_pb2 as pb
from twinkle.api.gateway.v1.key_service_pb2_grpc import KeyServiceStub
from twinkle_client.client import TwinkleClient, current_client
from twinkle_client.rpc import LoopThread, remote_method

SCOPES: dict[str, pb.Scope.ValueType] = {
    'train': pb.SCOPE_TRAIN,
    'sample': pb.SCOPE_SAMPLE,
    'data': pb.SCOPE_DATA,
    'operator': pb.SCOPE_OPERATOR,
    'admin': pb.SCOPE_ADMIN,
    'full_parameters': pb.SCOPE_FULL_PARAMETERS,
}
"""Scopes of API keys by name."""


class KeyAdministration:
    """Manages API keys, tenants and projects.

    The API key of `client` needs the scope 'admin'. `client` defaults to the client initialized last.
    """

    def __init__(self, *, client: TwinkleClient | None = None) -> None:
        self._connection = current_client(client).connection
        self._stub = KeyServiceStub(self._connection.channel)

    @property
    def loop_thread(self) -> LoopThread:
        """Event loop that runs the methods."""
        return self._connection.loop_thread

    @remote_method
    async def create_key(
        self,
        tenant_id: str,
        *,
        scopes: Sequence[str],
        display_name: str = '',
        ttl: timedelta | None = None,
        project_id: str = '',
    ) -> tuple[pb.ApiKey, str]:
        """Create an API key, and its tenant if it does not exist.

        Args:
            tenant_id: Tenant of the key.
            scopes: Names from `SCOPES`, at least one.
            display_name: Name for lists.
            ttl: Lifetime. Unset: unlimited.
            project_id: Default project of the key's sessions. Empty: none.

        Returns:
            The key and its secret, which cannot be retrieved again.

        Raises:
            ValueError: A scope is unknown.
            NotFoundError: The tenant has no such project.
            UsageError: `scopes` is empty, or an id or `ttl` is invalid.
            AccessError: The client's key lacks the scope 'admin'.
        """
        unknown = sorted(set(scopes) - set(SCOPES))
        if unknown:
            raise ValueError(f'scopes: {unknown} are unknown; known scopes are {list(SCOPES)}')
        request = pb.CreateKeyRequest(
            tenant_id=tenant_id,
            scopes=[SCOPES[scope] for scope in scopes],
            display_name=display_name,
            project_id=project_id,
        )
        if ttl is not None:
            request.ttl.FromTimedelta(ttl)
        await self._connection.unary(self._stub.CreateTenant, pb.CreateTenantRequest(tenant_id=tenant_id))
        response = await self._connection.unary(self._stub.CreateKey, request)
        return response.key, response.secret

    @remote_method
    async def list_keys(self, tenant_id: str) -> list[pb.ApiKey]:
        """Return a tenant's keys, newest first, without their secrets.

        Raises:
            NotFoundError: The tenant does not exist.
        """
        keys: list[pb.ApiKey] = []
        request = pb.ListKeysRequest(tenant_id=tenant_id, page_size=1000)
        while True:
            page = await self._connection.unary(self._stub.ListKeys, request)
            keys += page.keys
            if not page.next_page_token:
                return keys
            request.page_token = page.next_page_token

    @remote_method
    async def rotate_key(self, key_id: str, *, overlap: timedelta | None = None) -> tuple[pb.ApiKey, str, pb.ApiKey]:
        """Create a replacement for a key, with the same tenant, project, scopes, name and lifetime.

        Args:
            key_id: Key to replace.
            overlap: Time for which the old key remains valid, unless it expires earlier. Unset: one day.

        Returns:
            The new key, its secret, and the old key with its `retire_time`. The secret cannot be retrieved again.

        Raises:
            NotFoundError: The key does not exist.
            StateError: The key is no longer valid.
            UsageError: `overlap` is negative or longer than 36,500 days.
        """
        request = pb.RotateKeyRequest(key_id=key_id)
        if overlap is not None:
            request.overlap.FromTimedelta(overlap)
        response = await self._connection.unary(self._stub.RotateKey, request)
        return response.key, response.secret, response.replaced_key

    @remote_method
    async def create_tenant(self, tenant_id: str, *, display_name: str = '') -> pb.Tenant:
        """Return the tenant, creating it if it does not exist.

        Raises:
            UsageError: The id or the name is invalid.
        """
        request = pb.CreateTenantRequest(tenant_id=tenant_id, display_name=display_name)
        return (await self._connection.unary(self._stub.CreateTenant, request)).tenant

    @remote_method
    async def list_tenants(self) -> list[pb.Tenant]:
        """Return all tenants, newest first."""
        tenants: list[pb.Tenant] = []
        request = pb.ListTenantsRequest(page_size=1000)
        while True:
            page = await self._connection.unary(self._stub.ListTenants, request)
            tenants += page.tenants
            if not page.next_page_token:
                return tenants
            request.page_token = page.next_page_token

    @remote_method
    async def create_project(self, tenant_id: str, project_id: str, *, display_name: str = '') -> pb.Project:
        """Return the tenant's project, creating it if it does not exist.

        Raises:
            NotFoundError: The tenant does not exist.
            UsageError: The id or the name is invalid.
        """
        request = pb.CreateProjectRequest(tenant_id=tenant_id, project_id=project_id, display_name=display_name)
        return (await self._connection.unary(self._stub.CreateProject, request)).project

    @remote_method
    async def list_projects(self, tenant_id: str) -> list[pb.Project]:
        """Return a tenant's projects, newest first.

        Raises:
            NotFoundError: The tenant does not exist.
        """
        projects: list[pb.Project] = []
        request = pb.ListProjectsRequest(tenant_id=tenant_id, page_size=1000)
        while True:
            page = await self._connection.unary(self._stub.ListProjects, request)
            projects += page.projects
            if not page.next_page_token:
                return projects
            request.page_token = page.next_page_token

    @remote_method
    async def revoke_key(self, key_id: str) -> None:
        """Revoke a key. Other gateways on the same database may accept it for a few more seconds.

        Raises:
            NotFoundError: The key does not exist.
        """
        await self._connection.unary(self._stub.RevokeKey, pb.RevokeKeyRequest(key_id=key_id))
