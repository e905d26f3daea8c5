"""Certificates for development: made by the services' own tool, and told to a stack's services.

The tool runs as a process, as services do: a client is installed without the library that signs.
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from twinkle_client.stack.options import SERVICES
from twinkle_client.stack.spawning import StackError, service_of
from twinkle_client.stack.state import reachable

_TOOL = 'services.kit.certificates'
_RENEW_BEFORE = timedelta(days=30)
"""A stack renews certificates that end so soon when it starts."""


@dataclass(frozen=True)
class MadeCertificate:
    """A certificate in a folder."""

    path: Path
    names: tuple[str, ...]
    """DNS names, addresses and URIs it is for."""
    expire_time: datetime
    is_new: bool
    """Whether it was made just now."""

    def ends_within(self, time: timedelta) -> bool:
        """Whether it ends so soon."""
        return self.expire_time - datetime.now(UTC) < time


def make_certificates(
    folder: Path, hosts: Mapping[str, Sequence[str]] | None = None, *, is_forced: bool = False
) -> list[MadeCertificate]:
    """Make what is missing in a folder: an authority, and a certificate for each service.

    Args:
        folder: Where; made if need be.
        hosts: DNS names and addresses by service, beside its own name and this machine's loopback.
        is_forced: Make the services' anew, by the authority that is there.

    Returns:
        All that are there, the authority's first.

    Raises:
        StackError: They cannot be made, or the services are not installed; the message says what.
    """
    words = [word for name in SERVICES for word in ('--service', name)]
    words += [
        word for name, items in (hosts or {}).items() for host in items for word in ('--service', f'{name}={host}')
    ]
    command = [sys.executable, '-m', _TOOL, str(folder), *words, *(['--force'] if is_forced else [])]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        lines = result.stderr.strip().splitlines() or ['they could not be made']
        raise StackError(f'certificates: {lines[-1]}')
    return [
        MadeCertificate(
            Path(item['path']), tuple(item['names']), datetime.fromisoformat(item['expires']), item['is_new']
        )
        for item in json.loads(result.stdout)
    ]


def renewed_certificates(folder: Path, gateway: str) -> Path:
    """Make or renew what a stack needs, and return the file of the authority.

    Args:
        folder: Where.
        gateway: 'host:port' where clients find it.

    Raises:
        StackError: see `make_certificates`.
    """
    hosts = {'gateway': [reachable(gateway).rpartition(':')[0].strip('[]')]}
    made = make_certificates(folder, hosts)
    if any(item.ends_within(_RENEW_BEFORE) for item in made[1:]):
        made = make_certificates(folder, hosts, is_forced=True)
    return made[0].path


def tls_settings(authority: Path, name: str) -> dict[str, Any]:
    """Return the section `tls` of a process whose certificate lies beside its authority's.

    Each service is believed under its own name only, not as whoever has a certificate of this machine.
    """
    own = authority.parent / service_of(name)
    return {
        'certificate': str(own.with_suffix('.crt')),
        'key': str(own.with_suffix('.key')),
        'ca': str(authority),
        'server_names': {service: service for service in SERVICES},
    }
