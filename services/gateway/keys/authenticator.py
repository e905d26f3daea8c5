"""From credentials to a caller, with the scope that the method needs."""

import hmac
from collections.abc import Mapping

from services.gateway.keys.permissions import Access, requirement_of
from services.gateway.keys.verify_key import VerifyKey
from services.kit.caller import Caller
from services.kit.errors import CredentialsMissing, NotBuiltYet, ScopeMissing
from services.kit.rpc.auth import Authenticator, bearer_token


class KeyAuthenticator:
    """Takes API keys as bearer tokens. Nothing else that a client sends says who it is."""

    def __init__(self, verify: VerifyKey) -> None:
        """Look keys up with `verify`."""
        self._verify = verify

    async def authenticate(self, method: str, metadata: Mapping[str, str]) -> Caller:
        """Return the key's caller.

        Raises:
            CredentialsMissing: no key came.
            CredentialsInvalid: the key is unknown, revoked or expired.
            NotBuiltYet: the method is in no contract.
            ScopeMissing: the key may not, or the method is between services only.
        """
        key = await self._verify(bearer_token(metadata))
        requirement = requirement_of(method[1:])
        if requirement is None:
            raise NotBuiltYet(method[1:])
        if requirement is not Access.ANY_KEY and requirement not in key.scopes:
            raise ScopeMissing(requirement.value)
        return Caller(
            tenant_id=key.tenant_id,
            key_id=key.key_id,
            project_id=key.project_id,
            scopes=frozenset(scope.value for scope in key.scopes),
        )


class GatewayAuthenticator:
    """Takes the deployment's own token for methods between services, and API keys for all others.

    Neither opens the other's door: a key may never call a method between services, whatever its scopes, and
    whoever holds the token is nobody elsewhere.
    """

    def __init__(self, keys: Authenticator, services: Authenticator, *, internal_token: str, is_open: bool) -> None:
        """Tell callers apart.

        Args:
            keys: knows API keys.
            services: knows who holds `internal_token`.
            internal_token: the deployment's secret; empty: it has none.
            is_open: whether a deployment without a secret trusts whoever sends no credentials at all: only where
                nobody else's machine can reach it.
        """
        self._keys = keys
        self._services = services
        self._internal_token = internal_token
        self._is_open = is_open

    async def authenticate(self, method: str, metadata: Mapping[str, str]) -> Caller:
        """Return the caller.

        Raises:
            CredentialsMissing, CredentialsInvalid: nobody.
            NotBuiltYet: the method is in no contract.
            ScopeMissing: a key may not.
        """
        if requirement_of(method[1:]) is not Access.INTERNAL or not self._is_service(metadata):
            return await self._keys.authenticate(method, metadata)
        caller = await self._services.authenticate(method, metadata)
        return Caller(tenant_id=caller.tenant_id, is_internal=True)

    def _is_service(self, metadata: Mapping[str, str]) -> bool:
        if not self._internal_token:
            return self._is_open and 'authorization' not in metadata
        try:
            return hmac.compare_digest(bearer_token(metadata).encode(), self._internal_token.encode())
        except CredentialsMissing:
            return False
