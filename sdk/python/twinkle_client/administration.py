"""Tenants and API keys, for administrators."""

from collections.abc import Sequence
from datetime import timedelta

from google.protobuf import duration_pb2

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
}


class KeyAdministration:
    """Makes, lists and revokes keys; the client's own key needs the scope 'admin'."""

    def __init__(self, *, client: TwinkleClient | None = None) -> None:
        """Use `client`, or the one that was initialised last."""
        self._connection = current_client(client).connection
        self._stub = KeyServiceStub(self._connection.channel)

    @property
    def loop_thread(self) -> LoopThread:
        """Where its coroutines run."""
        return self._connection.loop_thread

    @remote_method
    async def create_key(
        self, tenant_id: str, *, scopes: Sequence[str], display_name: str = '', ttl: timedelta | None = None
    ) -> tuple[pb.ApiKey, str]:
        """Create a key, and its tenant if there is none of that id.

        Args:
            tenant_id: whom the key speaks for.
            scopes: names of `SCOPES`, at least one.
            display_name: for people to read.
            ttl: how long it lasts. Unset: without end.

        Returns:
            The key and its secret, which is never shown again.

        Raises:
            ValueError: a scope is unknown.
            AccessError: the client's key may not.
        """
        unknown = sorted(set(scopes) - set(SCOPES))
        if unknown:
            raise ValueError(f'scopes: {unknown} are unknown; known are {list(SCOPES)}')
        request = pb.CreateKeyRequest(
            tenant_id=tenant_id, scopes=[SCOPES[scope] for scope in scopes], display_name=display_name
        )
        if ttl is not None:
            duration = duration_pb2.Duration()
            duration.FromTimedelta(ttl)
            request.ttl.CopyFrom(duration)
        await self._connection.unary(self._stub.CreateTenant, pb.CreateTenantRequest(tenant_id=tenant_id))
        response = await self._connection.unary(self._stub.CreateKey, request)
        return response.key, response.secret

    @remote_method
    async def list_keys(self, tenant_id: str) -> list[pb.ApiKey]:
        """Return a tenant's keys, newest first, without their secrets."""
        keys: list[pb.ApiKey] = []
        request = pb.ListKeysRequest(tenant_id=tenant_id, page_size=1000)
        while True:
            page = await self._connection.unary(self._stub.ListKeys, request)
            keys += page.keys
            if not page.next_page_token:
                return keys
            request.page_token = page.next_page_token

    @remote_method
    async def revoke_key(self, key_id: str) -> None:
        """Make a key worthless from now on.

        Raises:
            NotFoundError: there is none of that id.
        """
        await self._connection.unary(self._stub.RevokeKey, pb.RevokeKeyRequest(key_id=key_id))
