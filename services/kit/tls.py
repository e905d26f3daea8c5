"""Certificate files of a service: settings, validation, and renewal while the service runs.

`twinkle_services.kit.certificates` creates certificates for development.
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
_RELOAD_SECONDS = 10.0
"""Time after which unusable files are read again even if they did not change, because they may become valid."""


class CertificateConfig(BaseModel):
    """Certificate that a process presents."""

    model_config = ConfigDict(frozen=True, extra='forbid')

    certificate: Path | None = None
    """PEM file with the certificate, followed by intermediate certificates. Unset: no TLS."""
    key: Path | None = None
    """PEM file with the unencrypted private key of the certificate."""

    @model_validator(mode='after')
    def _check_pair(self) -> Self:
        if (self.certificate is None) != (self.key is None):
            missing = 'key' if self.key is None else 'certificate'
            raise ValueError(f'{missing} is missing: set both certificate and key, or neither')
        return self


class TlsConfig(CertificateConfig):
    """Certificate of a service, and the certificates that it trusts."""

    ca: Path | None = None
    """PEM file with the authorities of this deployment's services. If set, other services are called over TLS, and
    their certificates must be signed by one of these authorities."""
    trusted_peers: tuple[str, ...] | None = None
    """URIs or DNS names in the certificates of trusted callers. Unset: `twinkle://<service>` for each service that
    calls this one, if `certificate` is set. Empty: no client certificates are required."""
    server_names: Mapping[str, str] = {}
    """Expected DNS names in the certificates of other services, such as `{sampler: sampler.internal}`. Default: the
    host of the service's address."""


@dataclass(frozen=True)
class Material:
    """Contents of the certificate files of a configuration."""

    certificate: bytes
    """PEM chain; empty if no certificate is configured."""
    key: bytes
    """PEM; empty if no key is configured."""
    authorities: bytes | None
    """PEM; None if no authorities are configured."""
    expire_time: datetime | None
    """Expiry of the certificate, in UTC; None without a certificate."""


class TlsFiles:
    """The certificate files of a configuration, reloaded when they change.

    Concurrency: safe to use from any thread.
    """

    def __init__(
        self, config: CertificateConfig, *, field: str = 'tls', clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Read the files.

        Args:
            config: Paths of the files.
            field: Name of the configuration, for error messages.
            clock: Monotonic time in seconds.

        Raises:
            ValueError: The files cannot be used; the message names the field and the fix.
        """
        self._config = config
        self._field = field
        self._clock = clock
        self._lock = threading.Lock()
        self._reload_at = math.inf
        self._problem = ''
        self._fingerprints = self._read_fingerprints()
        self._material = load_material(config, field=field)

    @property
    def paths(self) -> tuple[Path, Path]:
        """Paths of certificate and key.

        Raises:
            ValueError: No files are configured.
        """
        if self._config.certificate is None or self._config.key is None:
            raise ValueError(f'{self._field}: no certificate is configured; set certificate and key')
        return self._config.certificate, self._config.key

    def current(self) -> Material:
        """Return the contents of the files, or the last usable contents if the files cannot be used now.

        The same object is returned as long as the contents are unchanged.
        """
        with self._lock:
            fingerprints = self._read_fingerprints()
            if fingerprints != self._fingerprints or self._clock() >= self._reload_at:
                self._fingerprints = fingerprints
                self._reload()
            return self._material

    def _reload(self) -> None:
        try:
            material = load_material(self._config, field=self._field)
        except ValueError as error:
            # Probably only one of the two files has been renewed so far.
            if str(error) != self._problem:
                _log.warning('changed certificates cannot be used; keeping the previous ones', problem=str(error))
            self._reload_at, self._problem = self._clock() + _RELOAD_SECONDS, str(error)
            return
        self._reload_at, self._problem = math.inf, ''
        if material == self._material:
            return
        self._material = material
        _log.info('certificates renewed', expires=str(self._material.expire_time))

    def _read_fingerprints(self) -> tuple[tuple[int, int, int], ...]:
        return tuple(_file_fingerprint(path) for path in _paths(self._config) if path)


def shared_files(config: CertificateConfig, *, field: str = 'tls') -> TlsFiles:
    """Return the files of a configuration. All users of the same files share one object.

    A user that starts during a renewal therefore also receives the previous, usable contents.

    Args:
        config: Paths of the files.
        field: Name of the configuration, for error messages.

    Raises:
        ValueError: The files have never been usable in this process; the message names the field and the fix.
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
    return config.certificate, config.key, config.ca if isinstance(config, TlsConfig) else None


def load_material(config: CertificateConfig, *, field: str = 'tls', now: datetime | None = None) -> Material:
    """Return the contents of the files of `config`.

    Args:
        config: Paths of the files; paths that are not set yield empty contents.
        field: Name of the configuration, for error messages.
        now: Time at which the certificates must be valid; None for the current time.

    Raises:
        ValueError: A file is unreadable or damaged, the key is encrypted or does not match the certificate, the
            certificate is not valid at `now`, or all authorities have expired. The message names the field and the fix.
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
        raise ValueError(f'{field}.ca: every certificate in {authorities} has expired; add current ones')
    return Material(chain, key, roots, expire_time)


def names_in(certificate: x509.Certificate) -> tuple[str, ...]:
    """Return the DNS names, addresses and URIs of a certificate."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    return (
        *names.get_values_for_type(x509.DNSName),
        *(str(address) for address in names.get_values_for_type(x509.IPAddress)),
        *names.get_values_for_type(x509.UniformResourceIdentifier),
    )


def _file_fingerprint(path: Path) -> tuple[int, int, int]:
    try:
        found = path.stat()
    except OSError:
        return 0, 0, 0
    return found.st_mtime_ns, found.st_size, found.st_ino


def _read(path: Path, field: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        advice = 'set a PEM file that this process can read; `twinkle certs DIR` creates some for development'
        raise ValueError(f'{field}: cannot read {path} ({error.strerror}); {advice}') from None


def _certificates(content: bytes, path: Path, field: str) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(content)
    except ValueError:
        raise ValueError(f'{field}: {path} is not a certificate in PEM format; convert it') from None


def _check_time(certificate: x509.Certificate, path: Path, field: str, now: datetime) -> None:
    first, last = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if last <= now:
        raise ValueError(f'{field}: {path} expired on {last:%Y-%m-%d %H:%M} UTC; renew it')
    if first > now:
        raise ValueError(f'{field}: {path} is valid from {first:%Y-%m-%d %H:%M} UTC only; correct the clock, or wait')


def _check_key(content: bytes, certificate: x509.Certificate, location: str) -> None:
    try:
        key = load_pem_private_key(content, password=None)
    except TypeError:
        raise ValueError(f'{location} is encrypted; store it without a passphrase') from None
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ValueError(f'{location} is not a private key in PEM format; convert it') from error
    form = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    if key.public_key().public_bytes(*form) != certificate.public_key().public_bytes(*form):
        raise ValueError(f'{location} does not match the certificate; use a key and certificate of one pair')
