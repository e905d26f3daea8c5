"""Certificates for development: a private certificate authority, and the certificates that it signs for each service.

`python -m twinkle_services.kit.certificates DIR --service gateway` creates missing certificates in a folder and lists
those of the authority and the named services as JSON; `twinkle certs` prints them as text. Production deployments use
their own authority.
"""

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import cast

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from twinkle_services.kit.tls import names_in

AUTHORITY = 'ca'
"""Name of the authority's certificate and key files, without suffix."""
AUTHORITY_TIME = timedelta(days=3650)
"""Validity of a new authority."""
SERVICE_TIME = timedelta(days=365)
"""Validity of a new service certificate, unless the authority expires earlier."""
_LOOPBACK = ('localhost', '127.0.0.1', '::1')
_CLOCK_SKEW = timedelta(hours=1)
"""New certificates are backdated by this duration, so that machines whose clocks are behind accept them."""


@dataclass(frozen=True)
class IssuedCertificate:
    """A certificate in a folder."""

    path: Path
    names: tuple[str, ...]
    """DNS names, addresses and URIs of the certificate."""
    expire_time: datetime
    is_new: bool
    """Whether this call of `make_certificates` created or replaced the certificate."""


@dataclass(frozen=True)
class _Authority:
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def make_certificates(
    folder: Path, services: Mapping[str, Sequence[str]], *, is_forced: bool = False, now: datetime | None = None
) -> list[IssuedCertificate]:
    """Create a certificate and key for the authority (`ca.crt`, `ca.key`) and for each service, unless they exist.

    Only the owner can read the new files. A certificate of a service whose key is missing is replaced.

    Args:
        folder: Folder of the files; created if it does not exist.
        services: Hosts by service, as DNS names or addresses. The service's name and loopback are always included.
        is_forced: Whether to replace the certificates of the services. The existing authority signs the new ones, which
            keep the hosts of the previous ones.
        now: Time from which the validity is counted; None for the current time.

    Returns:
        The certificate of the authority, followed by those of `services`, in order.

    Raises:
        ValueError: A certificate is damaged or lacks a host, the authority has expired, or its key is missing or
            damaged.
        OSError: A file cannot be read or written.
    """
    now = now or datetime.now(UTC)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    issued: list[IssuedCertificate] = []
    is_new = not (folder / f'{AUTHORITY}.crt').exists()
    if is_new:
        _make_authority(folder, now)
    issued.append(_issued(folder / f'{AUTHORITY}.crt', is_new=is_new))
    if issued[0].expire_time <= now:
        raise ValueError(f'{issued[0].path} has expired: use another folder, and distribute its ca.crt to all clients')
    for service, hosts in services.items():
        wanted = tuple(dict.fromkeys((service, *_LOOPBACK, *hosts, f'twinkle://{service}')))
        path = folder / f'{service}.crt'
        is_new = is_forced or not path.exists() or not path.with_suffix('.key').exists()
        if is_new:
            previous = names_in(_load(path)) if path.exists() else ()
            _make_service(folder, service, tuple(dict.fromkeys((*wanted, *previous))), now)
        issued.append(_issued(path, is_new=is_new))
        if missing := set(wanted) - set(issued[-1].names):
            raise ValueError(f'{path} is not valid for {", ".join(sorted(missing))}; pass --force to replace it')
    return issued


def _make_authority(folder: Path, now: datetime) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, 'Twinkle development authority')])
    usage = x509.KeyUsage(
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    certificate = (
        _builder(name, name, key.public_key(), now, now + AUTHORITY_TIME)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    _write_pair(folder, AUTHORITY, certificate, key)


def _make_service(folder: Path, service: str, names: Sequence[str], now: datetime) -> None:
    authority = _load_authority(folder)
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, service)])
    end = min(now + SERVICE_TIME, authority.certificate.not_valid_after_utc)
    extended_usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    certificate = (
        _builder(subject, authority.certificate.subject, key.public_key(), now, end)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([_general_name(name) for name in names]), critical=False)
        .add_extension(extended_usage, critical=False)
        .add_extension(issuer, critical=False)
        .sign(authority.key, hashes.SHA256())
    )
    _write_pair(folder, service, certificate, key)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, begin: datetime, end: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin - _CLOCK_SKEW)
        .not_valid_after(end)
    )


def _general_name(name: str) -> x509.GeneralName:
    if '://' in name:
        return x509.UniformResourceIdentifier(name)
    with suppress(ValueError):
        return x509.IPAddress(ip_address(name))
    return x509.DNSName(name)


def _load_authority(folder: Path) -> _Authority:
    path = folder / f'{AUTHORITY}.key'
    if not path.exists():
        raise ValueError(f'{path} is missing, so no certificates can be signed; restore it, or use another folder')
    key = load_pem_private_key(path.read_bytes(), password=None)
    return _Authority(_load(folder / f'{AUTHORITY}.crt'), cast(ec.EllipticCurvePrivateKey, key))


def _load(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except ValueError:
        raise ValueError(f'{path} is not a certificate; delete it, or use another folder') from None


def _issued(path: Path, *, is_new: bool) -> IssuedCertificate:
    certificate = _load(path)
    return IssuedCertificate(path, names_in(certificate), certificate.not_valid_after_utc, is_new)


def _write_pair(folder: Path, name: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
    pem = serialization.Encoding.PEM
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    # The certificate is written last: without it, the pair counts as missing.
    _write(folder / f'{name}.key', secret)
    _write(folder / f'{name}.crt', certificate.public_bytes(pem))


def _write(path: Path, content: bytes) -> None:
    """Replace a file atomically with one that only its owner can read."""
    partial = path.with_name(f'.{path.name}.partial')
    partial.unlink(missing_ok=True)
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), 'wb') as file:
        file.write(content)
    partial.replace(path)


def main(arguments: Sequence[str] | None = None) -> None:
    """Create missing certificates, and print those of the authority and the requested services as JSON.

    Raises:
        SystemExit: The certificates cannot be created; the message gives the reason.
    """
    parser = argparse.ArgumentParser(prog='python -m twinkle_services.kit.certificates', description=__doc__)
    parser.add_argument('folder', type=Path)
    parser.add_argument('--service', action='append', default=[], help='service NAME, or NAME=HOST to add a host')
    parser.add_argument('--force', action='store_true')
    options = parser.parse_args(arguments)
    services: dict[str, list[str]] = {}
    for text in cast(list[str], options.service):
        service, _, host = text.partition('=')
        services.setdefault(service, []).extend([host] if host else [])
    try:
        issued = make_certificates(options.folder, services, is_forced=options.force)
    except (OSError, ValueError) as error:
        raise SystemExit(str(error)) from None
    rows = [
        {'path': str(item.path), 'names': item.names, 'expires': item.expire_time.isoformat(), 'is_new': item.is_new}
        for item in issued
    ]
    print(json.dumps(rows))  # noqa: T201 (a command)


if __name__ == '__main__':
    main()
