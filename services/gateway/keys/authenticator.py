"""Authenticates calls: credentials to a caller, with a check of the scope that the method needs."""

import hmac
from collections.abc import Mapping

from services.gateway.credentials import Access, requirement_of
from services.gateway.keys.verifier import KeyVerifier
from services.kit.caller import Caller
from services.kit.errors import CredentialsMissing, NotBuiltYet, ScopeMissing
from services.kit.rpc.auth import Authenticator, bearer_token


class KeyAuthenticator:
    """Authenticates clients by an API key as bearer token, and by nothing else that they send."""

    def __init__(self, verifier: KeyVerifier) -> None:
        self._verifier = verifier

    async def authenticate(self, method: str, metadata: Mapping[str, str]) -> Caller:
        """Return the caller that the key belongs to.

        Raises:
            CredentialsMissing: the call has no key.
            CredentialsInvalid: the key is unknown, revoked or expired.
            NotBuiltYet: the method is in no contract.
            ScopeMissing: the key lacks the scope, or only services may call the method.
        """
        key = await self._verifier.verify(bearer_token(metadata))
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
    """Accepts the deployment's internal token for methods between services, and API keys for all other methods.

    An API key never authenticates a method between services, and the internal token authenticates no other method.
    """

    def __init__(self, keys: Authenticator, services: Authenticator, *, internal_token: str, is_open: bool) -> None:
        """Combine two authenticators.

        Args:
            keys: authenticates API keys.
            services: authenticates holders of `internal_token`.
            internal_token: the deployment's secret; empty if it has none.
            is_open: whether a deployment without a secret trusts services that send no credentials. Set it only where
                other machines cannot reach the gateway.
        """
        self._keys = keys
        self._services = services
        self._internal_token = internal_token
        self._is_open = is_open

    async def authenticate(self, method: str, metadata: Mapping[str, str]) -> Caller:
        """Return the caller.

        Raises:
            CredentialsMissing, CredentialsInvalid: the credentials are missing or invalid.
            NotBuiltYet: the method is in no contract.
            ScopeMissing: the key lacks the scope, or only services may call the method.
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
