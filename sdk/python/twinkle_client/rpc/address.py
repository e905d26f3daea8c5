"""Server addresses as people write them."""

from dataclasses import dataclass
from urllib.parse import urlsplit

_SECURE = {'http': False, 'grpc': False, 'https': True, 'grpcs': True}
DEFAULT_PORT = 8000


@dataclass(frozen=True)
class Address:
    """Where a server listens."""

    host: str
    port: int
    is_secure: bool = False

    @classmethod
    def parse(cls, text: str) -> 'Address':
        """Read `http://host:port`, `https://...`, `grpc://...`, `grpcs://...` or `host:port`.

        A path is allowed and ignored; without a port it is that of the scheme, 8000 or 443.

        Raises:
            ValueError: `text` is none of these.
        """
        has_scheme = '://' in text
        parts = urlsplit(text if has_scheme else f'grpc://{text}')
        refused = ValueError(
            f"address {text!r} is neither 'host:port' nor one of {', '.join(_SECURE)} with ://host:port"
        )
        if parts.scheme not in _SECURE or not parts.hostname:
            raise refused
        try:
            port = parts.port
        except ValueError:
            raise refused from None
        is_secure = _SECURE[parts.scheme]
        return cls(parts.hostname, port or (443 if is_secure else DEFAULT_PORT), is_secure)

    @property
    def target(self) -> str:
        """What a gRPC channel is opened to."""
        host = f'[{self.host}]' if ':' in self.host else self.host
        return f'{host}:{self.port}'

    def __str__(self) -> str:
        return f'{"grpcs" if self.is_secure else "grpc"}://{self.target}'
