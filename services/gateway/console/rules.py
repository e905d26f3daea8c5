"""Sessions of browsers and their cookie, and the rules for requests that pages of other sites could send."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from twinkle_services.kit.errors import CredentialsInvalid, InvalidField

COOKIE = 'twinkle_console'
"""Name of the cookie of a session."""
COOKIE_PATH = '/console'
SESSION_TIME = timedelta(hours=12)
"""Lifetime of a session, unless its key ends earlier."""
MAX_SECRET_LENGTH = 1024
"""Maximum number of characters of an API key in a login."""
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
