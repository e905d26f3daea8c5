"""Certificates of local stacks.

The certificates are created by `twinkle_services.kit.certificates` in a subprocess, because the dependencies of that
module are not installed with the client alone.
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from twinkle_client.stack.hosts import StackError
from twinkle_client.stack.options import SERVICES
from twinkle_client.stack.spawning import service_of
from twinkle_client.stack.state import reachable

_TOOL = 'twinkle_services.kit.certificates'
_RENEW_BEFORE = timedelta(days=30)
"""A starting stack renews the certificates of services if a certificate expires within this time."""


@dataclass(frozen=True)
class MadeCertificate:
    """A certificate file."""

    path: Path
    names: tuple[str, ...]
    """DNS names, addresses and URIs in the certificate."""
    expire_time: datetime
    is_new: bool
    """Whether the file was created by this call of `make_certificates`."""

    def expires_within(self, time: timedelta) -> bool:
        return self.expire_time - datetime.now(UTC) < time


def make_certificates(
    folder: Path, hosts: Mapping[str, Sequence[str]] | None = None, *, is_forced: bool = False
) -> list[MadeCertificate]:
    """Create the missing certificates in a folder: a CA and one certificate per service.

    Args:
        folder: Output folder; created if necessary.
        hosts: Additional DNS names and addresses by service. The service name and loopback are always included.
        is_forced: Replace the service certificates; the CA is kept.

    Returns:
        All certificates in the folder, the CA first.

    Raises:
        StackError: The certificates cannot be created, or the services are not installed.
    """
    arguments = [word for name in SERVICES for word in ('--service', name)]
    arguments += [
        word for name, items in (hosts or {}).items() for host in items for word in ('--service', f'{name}={host}')
    ]
    command = [sys.executable, '-m', _TOOL, str(folder), *arguments, *(['--force'] if is_forced else [])]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        lines = result.stderr.strip().splitlines() or ['the tool failed without a message']
        raise StackError(f'certificates: {lines[-1]}')
    return [
        MadeCertificate(
            Path(item['path']), tuple(item['names']), datetime.fromisoformat(item['expires']), item['is_new']
        )
        for item in json.loads(result.stdout)
    ]


def renewed_certificates(folder: Path, gateway: str) -> Path:
    """Create missing certificates, renew all service certificates if any expires soon, and return the CA's path.

    Args:
        folder: Folder of the certificates.
        gateway: Address of the gateway for clients, 'host:port'.

    Raises:
        StackError: See `make_certificates`.
    """
    hosts = {'gateway': [reachable(gateway).rpartition(':')[0].strip('[]')]}
    certificates = make_certificates(folder, hosts)
    if any(item.expires_within(_RENEW_BEFORE) for item in certificates[1:]):
        certificates = make_certificates(folder, hosts, is_forced=True)
    return certificates[0].path


def tls_settings(authority: Path, name: str) -> dict[str, Any]:
    """Return the section `tls` of a service's configuration.

    Peers are verified by service name, because all certificates of this machine share its host names.
    """
    own = authority.parent / service_of(name)
    return {
        'certificate': str(own.with_suffix('.crt')),
        'key': str(own.with_suffix('.key')),
        'ca': str(authority),
        'server_names': {service: service for service in SERVICES},
    }
