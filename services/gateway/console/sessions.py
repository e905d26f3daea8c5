"""Logins: exchanges API keys and one-time links for cookies, and finds the key of a call.

A session is stored only in its cookie, encrypted with the deployment's pepper, so every gateway with this pepper
accepts it. The key is verified at each call, so a revoked key ends its sessions.
"""

import base64
import binascii
import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from twinkle_services.gateway.console.rules import MAX_SECRET_LENGTH, Credential, cookie_value, session_end
from twinkle_services.gateway.keys.authenticator import KeyVerifier
from twinkle_services.gateway.keys.pepper import PepperedSealer
from twinkle_services.gateway.keys.rules import ApiKey
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.clock import Clock
from twinkle_services.kit.errors import CredentialsInvalid, CredentialsMissing
from twinkle_services.kit.rpc.auth import bearer_token

LINK_TIME = timedelta(minutes=10)
"""Time for which a link can be used."""
LINKS_PER_TENANT = 16
"""Maximum number of a tenant's unused links; a further link replaces the oldest one."""
_PURPOSE = 'console session'


@dataclass(frozen=True, kw_only=True)
class BrowserSession:
    """Session of a browser."""

    key: ApiKey
    credential: Credential

    @property
    def expire_time(self) -> datetime:
        """UTC, in whole seconds."""
        return self.credential.expire_time


class BrowserSessions:
    """Starts sessions and verifies the keys of calls."""

    def __init__(self, verifier: KeyVerifier, sealer: PepperedSealer, *, clock: Clock) -> None:
        self._verifier = verifier
        self._sealer = sealer
        self._clock = clock

    async def start(self, secret: str) -> BrowserSession:
        """Return a session of the key with this secret.

        Raises:
            CredentialsInvalid: no valid key has this secret.
        """
        key = await self.verify(Credential(secret=secret))
        end = session_end(self._clock.now(), key.expire_time, key.retire_time)
        return BrowserSession(key=key, credential=Credential(secret=secret, expire_time=end))

    def lifetime(self, session: BrowserSession) -> timedelta:
        """Return the time until a session ends."""
        return session.expire_time - self._clock.now()

    def seal(self, session: BrowserSession) -> str:
        """Return the value of a session's cookie."""
        return base64.urlsafe_b64encode(self._sealer.seal(session.credential.to_text(), purpose=_PURPOSE)).decode()

    async def find(self, headers: Mapping[str, str]) -> BrowserSession:
        """Return the session of a request's cookie.

        Raises:
            CredentialsMissing: the request has no cookie of a session.
            CredentialsInvalid: the cookie is damaged, the session has ended, or its key is no longer valid.
        """
        credential = self._from_cookie(headers)
        return BrowserSession(key=await self.verify(credential), credential=credential)

    def credential_of(self, headers: Mapping[str, str]) -> Credential:
        """Return the key of a request, unverified: its bearer token or, without an `Authorization`, its cookie's key.

        Raises:
            CredentialsMissing: the request has neither.
            CredentialsInvalid: the cookie is damaged.
        """
        if 'authorization' in headers:
            return Credential(secret=bearer_token(headers))
        return self._from_cookie(headers)

    async def caller_of(self, headers: Mapping[str, str]) -> Caller:
        """Return the caller of a request's key.

        Raises:
            CredentialsMissing: the request has no key.
            CredentialsInvalid: the key is not valid, or the session has ended.
        """
        return (await self.verify(self.credential_of(headers))).caller

    async def verify(self, credential: Credential) -> ApiKey:
        """Return the valid key of a credential.

        Raises:
            CredentialsInvalid: no valid key has this secret, or the session has ended.
        """
        if credential.expire_time <= self._clock.now():
            raise CredentialsInvalid()
        secret = credential.secret
        # Metadata of gRPC consists of printable ASCII characters, so no other key can call a method.
        if len(secret) > MAX_SECRET_LENGTH or not (secret.isascii() and secret.isprintable()):
            raise CredentialsInvalid()
        return await self._verifier.verify(secret)

    def _from_cookie(self, headers: Mapping[str, str]) -> Credential:
        value = cookie_value(headers)
        if not value:
            raise CredentialsMissing()
        try:
            sealed = base64.b64decode(value, altchars=b'-_', validate=True)
        except (binascii.Error, ValueError) as error:
            raise CredentialsInvalid() from error
        return Credential.from_text(self._sealer.open(sealed, purpose=_PURPOSE))


@dataclass(frozen=True)
class _Link:
    tenant_id: str
    secret: str = field(repr=False)
    expire_time: datetime


class LoginLinks:
    """One-time links, in the memory of this gateway. Concurrency: use it from one event loop only."""

    def __init__(self, *, clock: Clock) -> None:
        self._clock = clock
        self._links: OrderedDict[bytes, _Link] = OrderedDict()

    @property
    def count(self) -> int:
        """Number of links in memory."""
        return len(self._links)

    def create(self, tenant_id: str, secret: str) -> tuple[str, datetime]:
        """Return a link that logs in with a key of the tenant, and its time of expiry."""
        now = self._clock.now()
        # All links have the same lifetime, so the first ones expire first.
        while self._links and next(iter(self._links.values())).expire_time <= now:
            self._links.popitem(last=False)
        own = [digest for digest, link in self._links.items() if link.tenant_id == tenant_id]
        if len(own) >= LINKS_PER_TENANT:
            del self._links[own[0]]
        text = secrets.token_urlsafe(32)
        link = _Link(tenant_id, secret, now + LINK_TIME)
        self._links[_digest(text)] = link
        return text, link.expire_time

    def redeem(self, text: str) -> str:
        """Remove a link, and return the secret of its key.

        Raises:
            CredentialsInvalid: the link is unknown, used or expired.
        """
        link = self._links.pop(_digest(text), None)
        if link is None or link.expire_time <= self._clock.now():
            raise CredentialsInvalid()
        return link.secret


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
