"""Parsing of server addresses."""

from dataclasses import dataclass
from urllib.parse import urlsplit

_SECURE = {'http': False, 'grpc': False, 'https': True, 'grpcs': True}
DEFAULT_PORT = 8000


@dataclass(frozen=True)
class Address:
    """Host, port and security of a server."""

    host: str
    port: int
    is_secure: bool = False

    @classmethod
    def parse(cls, text: str) -> 'Address':
        """Parse `http://host:port`, `https://...`, `grpc://...`, `grpcs://...` or `host:port`.

        A path is ignored. The port defaults to 443 with TLS and to 8000 without TLS.

        Raises:
            ValueError: `text` has none of these forms.
        """
        has_scheme = '://' in text
        parts = urlsplit(text if has_scheme else f'grpc://{text}')
        malformed = ValueError(
            f"address {text!r} is malformed; use 'host:port' or '<scheme>://host:port' with one of the schemes "
            f'{", ".join(_SECURE)}'
        )
        if parts.scheme not in _SECURE or not parts.hostname:
            raise malformed
        try:
            port = parts.port
        except ValueError:
            raise malformed from None
        is_secure = _SECURE[parts.scheme]
        return cls(parts.hostname, port or (443 if is_secure else DEFAULT_PORT), is_secure)

    @property
    def target(self) -> str:
        """Target of a gRPC channel, `host:port`."""
        host = f'[{self.host}]' if ':' in self.host else self.host
        return f'{host}:{self.port}'

    def __str__(self) -> str:
        return f'{"grpcs" if self.is_secure else "grpc"}://{self.target}'
