"""From an API key to a caller, with the scope that the method needs."""

from collections.abc import Mapping

from services.gateway.application.verify_key import VerifyKey
from services.gateway.domain.permissions import Access, requirement_of
from services.kit.caller import Caller
from services.kit.errors import NotBuiltYet, ScopeMissing
from services.kit.rpc.auth import bearer_token


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
        return Caller(tenant_id=key.tenant_id, key_id=key.key_id, scopes=frozenset(scope.value for scope in key.scopes))
