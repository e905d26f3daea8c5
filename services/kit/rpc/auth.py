"""Authentication of callers. The gateway checks API keys. Other services trust calls with the internal token."""

import hmac
from collections.abc import Mapping
from datetime import timedelta
from typing import Protocol

from twinkle_services.kit.caller import Caller
from twinkle_services.kit.errors import CredentialsInvalid, CredentialsMissing

TENANT_KEY = 'x-twinkle-tenant'
"""Tenant of the call; trusted only together with the internal token."""
KEY_ID_KEY = 'x-twinkle-key'
SCOPES_KEY = 'x-twinkle-scopes'
INTERNAL_KEY = 'x-twinkle-internal'
"""'1' if a service makes the call itself; absent if the gateway forwards a client's call."""
ALL_SCOPES = frozenset({'train', 'sample', 'data', 'operator', 'admin', 'full_parameters'})


class Authenticator(Protocol):
    """Determines the caller of a call."""

    @property
    def recheck_interval(self) -> timedelta | None:
        """Interval at which the caller of an open stream is authenticated again; None if callers stay valid."""
        ...

    async def authenticate(self, method: str, metadata: Mapping[str, str]) -> Caller:
        """Return the caller.

        Args:
            method: Full name of the method, with a leading slash.
            metadata: Metadata of the call.

        Raises:
            CredentialsMissing, CredentialsInvalid: The call has no valid credentials.
            ScopeMissing: The caller may not call this method.
        """
        ...


class InternalAuthenticator:
    """Trusts callers with the deployment's internal token and takes the tenant from the metadata."""

    recheck_interval = None

    def __init__(self, token: str) -> None:
        """Expect `token`. With an empty token, all callers are trusted; servers allow this on loopback only."""
        self._token = token

    async def authenticate(self, method: str, metadata: Mapping[str, str]) -> Caller:
        """Return the caller that the metadata names, with all scopes if the metadata has no entry for scopes.

        If no token is configured, the tenant of a forwarded call defaults to `default`.

        Raises:
            CredentialsMissing: The token is missing, or a forwarded call names no tenant.
            CredentialsInvalid: The token is wrong.
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
        CredentialsMissing: The header is missing or has no bearer token.
    """
    kind, _, token = metadata.get('authorization', '').partition(' ')
    if kind.lower() != 'bearer' or not token.strip():
        raise CredentialsMissing()
    return token.strip()
