"""From credentials to a caller. The gateway knows API keys; the others trust its token."""

import hmac
from collections.abc import Mapping
from typing import Protocol

from services.kit.caller import Caller
from services.kit.errors import CredentialsInvalid, CredentialsMissing

TENANT_KEY = 'x-twinkle-tenant'
"""Tenant on whose behalf a service is called; only ever believed beside the internal token."""
KEY_ID_KEY = 'x-twinkle-key'
SCOPES_KEY = 'x-twinkle-scopes'
INTERNAL_KEY = 'x-twinkle-internal'
"""'1' where a service calls by itself; absent where the gateway forwards a client's call."""
ALL_SCOPES = frozenset({'train', 'sample', 'data', 'operator', 'admin'})


class Authenticator(Protocol):
    """Tells who is calling."""

    async def authenticate(self, method: str, metadata: Mapping[str, str]) -> Caller:
        """Return the caller.

        Args:
            method: full name with leading slash.
            metadata: what came with the call.

        Raises:
            CredentialsMissing, CredentialsInvalid: nobody.
            ScopeMissing: somebody who may not.
        """
        ...


class InternalAuthenticator:
    """Trusts whoever holds the deployment's internal token; the tenant comes from the metadata."""

    def __init__(self, token: str) -> None:
        """Expect `token`; an empty one trusts everybody, which the server refuses beyond loopback."""
        self._token = token

    async def authenticate(self, method: str, metadata: Mapping[str, str]) -> Caller:
        """Return the caller the metadata names.

        Raises:
            CredentialsMissing: no token came.
            CredentialsInvalid: another token came.
        """
        del method
        if self._token:
            sent = bearer_token(metadata)
            if not hmac.compare_digest(sent.encode(), self._token.encode()):
                raise CredentialsInvalid()
        is_internal = metadata.get(INTERNAL_KEY) == '1'
        tenant_id = metadata.get(TENANT_KEY, '')
        if not tenant_id and not is_internal:
            if self._token:
                raise CredentialsMissing()
            tenant_id = 'default'
        scopes = metadata.get(SCOPES_KEY)
        return Caller(
            tenant_id=tenant_id,
            key_id=metadata.get(KEY_ID_KEY, ''),
            scopes=ALL_SCOPES if scopes is None else frozenset(filter(None, scopes.split(','))),
            is_internal=is_internal,
        )


def bearer_token(metadata: Mapping[str, str]) -> str:
    """Return the token of the `authorization` header.

    Raises:
        CredentialsMissing: there is none, or it is no bearer token.
    """
    kind, _, token = metadata.get('authorization', '').partition(' ')
    if kind.lower() != 'bearer' or not token.strip():
        raise CredentialsMissing()
    return token.strip()
