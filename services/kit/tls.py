"""Certificates of a service as files: what is configured, whether it can be used, and its renewal while it is in use.

What grpc and HTTP make of them is theirs; how certificates are made for development is `certificates`.
"""

import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

import structlog
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key
from pydantic import BaseModel, ConfigDict, model_validator

_log = structlog.get_logger('tls')
_AGAIN_SECONDS = 10.0
"""Until files that are of no use are looked at again: what changes that need not show in them."""


class CertificateConfig(BaseModel):
    """What one shows to others."""

    model_config = ConfigDict(frozen=True, extra='forbid')

    certificate: Path | None = None
    """PEM file: the own certificate first, then those between it and the authority. Unset: no TLS."""
    key: Path | None = None
    """PEM file of its private key, not encrypted."""

    @model_validator(mode='after')
    def _check_pair(self) -> Self:
        if (self.certificate is None) != (self.key is None):
            missing = 'key' if self.key is None else 'certificate'
            raise ValueError(f'{missing} is missing: certificate and key go together')
        return self


class TlsConfig(CertificateConfig):
    """How a service proves who it is to the others, and whom it believes."""

    ca: Path | None = None
    """PEM file of the authorities that sign the services of this deployment. Set: other services are called over TLS,
    and only where one of these signed what they show."""
    trusted_peers: tuple[str, ...] | None = None
    """Who may call, by a name in their certificate: a URI, else a DNS name. Unset: `twinkle://<service>` for each
    service that has to call this one. Empty: nobody is asked for a certificate."""
    server_names: Mapping[str, str] = {}
    """DNS name in the certificate of a service that is called, by service, such as `{sampler: sampler.internal}`.
    Where there is none: the host of its address."""


@dataclass(frozen=True)
class Material:
    """Contents of certificate files that belong together."""

    certificate: bytes
    """PEM chain; empty where none is configured."""
    key: bytes
    """PEM; empty where none is configured."""
    authorities: bytes | None
    """PEM; None where none are configured."""
    expire_time: datetime | None
    """When the certificate ends, in UTC; None where there is none."""


class TlsFiles:
    """The files of a configuration, read again when they change.

    Concurrency: from any thread.
    """

    def __init__(
        self, config: CertificateConfig, *, field: str = 'tls', clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Read the files.

        Args:
            config: where they are.
            field: what the configuration is called, for messages.
            clock: seconds that never go back.

        Raises:
            ValueError: they cannot be used; names the field and the cure.
        """
        self._config = config
        self._field = field
        self._clock = clock
        self._lock = threading.Lock()
        self._again_at = math.inf
        self._problem = ''
        self._signature = self._sign()
        self._material = load_material(config, field=field)

    @property
    def paths(self) -> tuple[Path, Path]:
        """Certificate and key.

        Raises:
            ValueError: none are configured.
        """
        if self._config.certificate is None or self._config.key is None:
            raise ValueError(f'{self._field}: has no certificate')
        return self._config.certificate, self._config.key

    def current(self) -> Material:
        """Return what the files hold now; where that cannot be used, what they held before.

        What is unchanged is the same object, also where a file was written again with the same bytes.
        """
        with self._lock:
            signature = self._sign()
            if signature != self._signature or self._clock() >= self._again_at:
                self._signature = signature
                self._reload()
            return self._material

    def _reload(self) -> None:
        try:
            material = load_material(self._config, field=self._field)
        except ValueError as error:
            # Half of a renewal, most likely: the other file changes next.
            if str(error) != self._problem:
                _log.warning('changed certificates are of no use yet; the ones before stay', problem=str(error))
            self._again_at, self._problem = self._clock() + _AGAIN_SECONDS, str(error)
            return
        self._again_at, self._problem = math.inf, ''
        if material == self._material:
            return
        self._material = material
        _log.info('certificates renewed', expires=str(self._material.expire_time))

    def _sign(self) -> tuple[tuple[int, int, int], ...]:
        return tuple(_mark(path) for path in _paths(self._config) if path)


def shared_files(config: CertificateConfig, *, field: str = 'tls') -> TlsFiles:
    """Return the files of a configuration, the same object for all of this process.

    So what was in use stays in use for whoever comes during a renewal, too.

    Args:
        config: where they are.
        field: what the configuration is called, for messages.

    Raises:
        ValueError: they were never of use to this process, and are not now; names the field and the cure.
    """
    paths = _paths(config)
    with _shared_lock:
        if paths not in _shared:
            _shared[paths] = TlsFiles(config, field=field)
        return _shared[paths]


_Paths = tuple[Path | None, Path | None, Path | None]
_shared: dict[_Paths, TlsFiles] = {}
_shared_lock = threading.Lock()


def _paths(config: CertificateConfig) -> _Paths:
    """Return where certificate, key and authorities are."""
    return config.certificate, config.key, config.ca if isinstance(config, TlsConfig) else None


def load_material(config: CertificateConfig, *, field: str = 'tls', now: datetime | None = None) -> Material:
    """Return the contents of the files of `config`.

    Args:
        config: where they are; those that are not set come out empty.
        field: what the configuration is called, for messages.
        now: when they have to be valid. Unset: now.

    Raises:
        ValueError: a file is missing, damaged, expired, or not the other's; names the field and the cure.
    """
    now = now or datetime.now(UTC)
    chain, key, expire_time = b'', b'', None
    if config.certificate is not None and config.key is not None:
        chain, key = _read(config.certificate, f'{field}.certificate'), _read(config.key, f'{field}.key')
        own = _certificates(chain, config.certificate, f'{field}.certificate')[0]
        _check_time(own, config.certificate, f'{field}.certificate', now)
        _check_key(key, own, f'{field}.key: {config.key}')
        expire_time = own.not_valid_after_utc
    authorities = config.ca if isinstance(config, TlsConfig) else None
    if authorities is None:
        return Material(chain, key, None, expire_time)
    roots = _read(authorities, f'{field}.ca')
    usable = [item for item in _certificates(roots, authorities, f'{field}.ca') if item.not_valid_after_utc > now]
    if not usable:
        raise ValueError(f'{field}.ca: every certificate in {authorities} has expired; give those that sign now')
    return Material(chain, key, roots, expire_time)


def names_in(certificate: x509.Certificate) -> tuple[str, ...]:
    """Return the DNS names, addresses and URIs that a certificate is for."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    return (
        *names.get_values_for_type(x509.DNSName),
        *(str(address) for address in names.get_values_for_type(x509.IPAddress)),
        *names.get_values_for_type(x509.UniformResourceIdentifier),
    )


def _mark(path: Path) -> tuple[int, int, int]:
    try:
        found = path.stat()
    except OSError:
        return 0, 0, 0
    return found.st_mtime_ns, found.st_size, found.st_ino


def _read(path: Path, field: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        cure = 'give a PEM file that this process can read; `twinkle certs DIR` makes some for development'
        raise ValueError(f'{field}: cannot read {path} ({error.strerror}); {cure}') from None


def _certificates(content: bytes, path: Path, field: str) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(content)
    except ValueError:
        raise ValueError(f'{field}: {path} holds no certificate in PEM form') from None


def _check_time(certificate: x509.Certificate, path: Path, field: str, now: datetime) -> None:
    first, last = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if last <= now:
        raise ValueError(f'{field}: {path} expired on {last:%Y-%m-%d %H:%M} UTC; renew it')
    if first > now:
        raise ValueError(f'{field}: {path} is valid from {first:%Y-%m-%d %H:%M} UTC only; set the clock, or wait')


def _check_key(content: bytes, certificate: x509.Certificate, place: str) -> None:
    try:
        key = load_pem_private_key(content, password=None)
    except TypeError:
        raise ValueError(f'{place} is encrypted; give it without a passphrase') from None
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ValueError(f'{place} holds no private key in PEM form') from error
    form = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    if key.public_key().public_bytes(*form) != certificate.public_key().public_bytes(*form):
        raise ValueError(f'{place} is not the key of the certificate; give the two that were made together')
