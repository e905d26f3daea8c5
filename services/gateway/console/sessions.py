"""Logins: exchanges API keys and one-time links for cookies, and finds the key of a call.

A session is stored only in its cookie, encrypted with the deployment's pepper, so every gateway with this pepper
accepts it. The key is verified at each call, so a revoked key ends its sessions. The first functions are the rules for
cookies, and for requests that pages of other sites could send.
"""

import base64
import binascii
import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from twinkle_services.gateway.keys.authenticator import KeyVerifier
from twinkle_services.gateway.keys.pepper import PepperedSealer
from twinkle_services.gateway.keys.rules import ApiKey
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.clock import Clock
from twinkle_services.kit.errors import CredentialsInvalid, CredentialsMissing, InvalidField
from twinkle_services.kit.rpc.auth import bearer_token

COOKIE = 'twinkle_console'
"""Name of the cookie of a session."""
COOKIE_PATH = '/console'
SESSION_TIME = timedelta(hours=12)
"""Lifetime of a session, unless its key ends earlier."""
MAX_SECRET_LENGTH = 1024
"""Maximum number of characters of an API key in a login."""
LINK_TIME = timedelta(minutes=10)
"""Time for which a link can be used."""
LINKS_PER_TENANT = 16
"""Maximum number of a tenant's unused links; a further link replaces the oldest one."""
_PURPOSE = 'console session'
_NEVER = datetime.max.replace(tzinfo=UTC)


@dataclass(frozen=True, kw_only=True)
class Credential:
    """API key of a call by a browser or a program."""

    secret: str = field(repr=False)
    expire_time: datetime = _NEVER
    """End of the session that contains the key; the default is for a key that the call itself presents."""

    def to_text(self) -> str:
        """Return the text that the cookie contains in encrypted form."""
        return f'{int(self.expire_time.timestamp())} {self.secret}'

    @classmethod
    def from_text(cls, text: str) -> 'Credential':
        """Return the credential of a decrypted cookie."""
        seconds, _, secret = text.partition(' ')
        if not seconds.isdigit() or not secret:
            raise CredentialsInvalid()
        return cls(secret=secret, expire_time=datetime.fromtimestamp(int(seconds), UTC))


def session_end(now: datetime, *key_ends: datetime | None) -> datetime:
    """Return the end, in whole seconds, of a session that begins at `now`; the earliest of `key_ends` limits it."""
    end = min([now + SESSION_TIME, *(moment for moment in key_ends if moment is not None)])
    return end.replace(microsecond=0)


def cookie_value(headers: Mapping[str, str]) -> str:
    """Return the value of the session's cookie; empty without one. Of several cookies, the first one is used."""
    for part in headers.get('cookie', '').split(';'):
        name, _, value = part.strip().partition('=')
        if name == COOKIE:
            return value
    return ''


def set_cookie(value: str, *, lifetime: timedelta, is_secure: bool) -> str:
    """Return the `Set-Cookie` header that stores a session; an empty value with a lifetime of zero deletes it."""
    attributes = [f'{COOKIE}={value}', f'Path={COOKIE_PATH}', f'Max-Age={int(lifetime.total_seconds())}']
    attributes += ['HttpOnly', 'SameSite=Strict', *(['Secure'] if is_secure else [])]
    return '; '.join(attributes)


def check_origin(headers: Mapping[str, str]) -> None:
    """Refuse a request that a browser sends for a page of another site. Programs send no `Origin`.

    Raises:
        InvalidField: the header `Origin` names a different host or port than the header `Host`.
    """
    origin = headers.get('origin')
    if origin is None:
        return
    host = headers.get('host', '')
    if not host or origin.partition('://')[2].lower() != host.lower():
        raise InvalidField('origin', 'must equal the host; open the console there, and let proxies keep `Host`')


def uses_tls(headers: Mapping[str, str], scheme: str) -> bool:
    """Return whether the browser uses TLS, with this server or with a proxy in front of it.

    A browser sends the scheme of its page in `Origin`.
    """
    return scheme == 'https' or headers.get('origin', '').startswith('https://')


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
        """Return a link that logs in with a key of the tenant, and the time at which the link expires."""
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
