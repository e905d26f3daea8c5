"""Links to files that need no key: who may follow one stands in it, signed."""

import base64
import binascii
import hashlib
import hmac
import json
import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from services.gateway.http.call import HttpCall
from services.kit.clock import Clock
from services.kit.errors import CredentialsInvalid, InvalidField

LIFETIME = timedelta(hours=1)
_MOST_CHARACTERS = 2048
_HOST = re.compile(r'[A-Za-z0-9.\-_]{1,253}(:\d{1,5})?|\[[0-9A-Fa-f:.]{2,45}\](:\d{1,5})?')


@dataclass(frozen=True)
class Link:
    """What a link leads to."""

    tenant_id: str
    """Whoever follows it reads as this tenant."""
    path: str
    """The checkpoint, by our own path."""
    file: str
    """Name of a file in its archive; empty: the archive itself."""
    expire_time: datetime


class Links:
    """Makes and reads links. Gateways with one key read each other's."""

    def __init__(self, key: bytes, *, clock: Clock, lifetime: timedelta = LIFETIME) -> None:
        """Sign with `key`; links are good for `lifetime`, whatever becomes of the key they were asked for with."""
        self._key = key
        self._clock = clock
        self._lifetime = lifetime

    def make(self, tenant_id: str, path: str, file: str = '') -> tuple[str, datetime]:
        """Return a link's token, and when it expires."""
        expire_time = self._clock.now() + self._lifetime
        facts = [tenant_id, path, file, int(expire_time.timestamp())]
        body = base64.urlsafe_b64encode(json.dumps(facts, separators=(',', ':')).encode()).rstrip(b'=')
        return f'{body.decode()}.{self._signature(body)}', expire_time

    def read(self, token: str) -> Link:
        """Return what a token leads to.

        Raises:
            CredentialsInvalid: it was not made here, or its time is over.
        """
        text, _, signature = token.rpartition('.')
        body = text.encode()
        is_ours = len(token) <= _MOST_CHARACTERS and hmac.compare_digest(
            self._signature(body).encode(), signature.encode()
        )
        if not is_ours:
            raise CredentialsInvalid()
        try:
            tenant_id, path, file, seconds = json.loads(base64.urlsafe_b64decode(body + b'=' * (-len(body) % 4)))
        except (ValueError, binascii.Error) as error:
            raise CredentialsInvalid() from error
        expire_time = datetime.fromtimestamp(seconds, UTC)
        if expire_time <= self._clock.now():
            raise CredentialsInvalid()
        return Link(tenant_id, path, file, expire_time)

    def _signature(self, body: bytes) -> str:
        return hmac.new(self._key, b'twinkle-link-1\0' + body, hashlib.sha256).hexdigest()


def server_url(call: HttpCall) -> str:
    """Return where the client reached this server, as it says itself: the link is for nobody else.

    Raises:
        InvalidField: that is no place.
    """
    host = call.headers.get('host', '')
    if not _HOST.fullmatch(host):
        raise InvalidField('host', 'must be the host and port that this server was called at')
    scheme = call.headers.get('x-forwarded-proto', str(call.scope.get('scheme', 'http')))
    return f'{"https" if scheme == "https" else "http"}://{host}'
