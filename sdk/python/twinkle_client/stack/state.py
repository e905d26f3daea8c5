"""The record of a running stack, by which other programs find and stop it."""

import json
import os
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from twinkle_client.stack.hosts import ANY_HOST, RayPlacement, ServiceProcess, find_process

_FILE = 'stack.json'
_KEY_FILE = 'api_key'


def default_state_dir() -> Path:
    """Return `TWINKLE_STATE_DIR`, or the folder `twinkle` in the user's state folder."""
    if folder := os.environ.get('TWINKLE_STATE_DIR'):
        return Path(folder)
    base = os.environ.get('XDG_STATE_HOME')
    return (Path(base) if base else Path.home() / '.local' / 'state') / 'twinkle'


@dataclass(frozen=True, kw_only=True)
class ServiceState:
    """The record of a service process."""

    name: str
    pid: int
    start_mark: str
    """Distinguishes the process from a later process with the same id; see `process_ids.start_mark`."""
    address: str
    """Address of the service; empty while it starts."""
    log_path: str
    base_model: str = ''
    """Base model of the process; empty if it has none."""
    is_leaving: bool = False
    """Whether the service is draining and will then exit."""
    actor: str = ''
    """Cluster and name of the Ray actor that runs the process; empty on this machine."""

    @property
    def process(self) -> ServiceProcess:
        """The process."""
        return find_process(self.pid, self.start_mark, self.actor)

    @property
    def is_restarted(self) -> bool:
        """Whether the service is restarted when it exits."""
        return bool(self.address) and not self.is_leaving

    def is_running(self) -> bool:
        """Return whether the process is running."""
        return self.process.is_running()


@dataclass(frozen=True, kw_only=True)
class StackState:
    """The record of a stack. Services are in start order."""

    state_dir: Path
    address: str
    """gRPC address of the gateway, 'host:port'; empty until the stack is up."""
    base_model: str
    services: tuple[ServiceState, ...]
    start_time: float
    http_address: str = ''
    """HTTP address of the gateway; empty without HTTP."""
    more_models: tuple[str, ...] = ()
    """Additional base models."""
    ca: str = ''
    """Path of the CA certificate; empty without TLS."""
    placement: RayPlacement | None = None
    """Placement on a Ray cluster, or None if all processes run on this machine."""

    @property
    def base_models(self) -> tuple[str, ...]:
        """All base models, in the order of their services."""
        return self.base_model, *self.more_models

    @property
    def url(self) -> str:
        """Address for clients: the gateway's address, with https:// if it uses TLS."""
        return f'https://{reachable(self.address)}' if self.ca and self.address else self.address

    @property
    def http_url(self) -> str:
        """URL for HTTP clients; empty without HTTP."""
        scheme, address = ('https', reachable(self.http_address)) if self.ca else ('http', self.http_address)
        return f'{scheme}://{address}' if address else ''

    @classmethod
    def load(cls, state_dir: Path) -> 'StackState | None':
        """Return the record in `state_dir`, or None if there is no readable record."""
        try:
            values = json.loads((state_dir / _FILE).read_text(encoding='utf-8'))
            services = tuple(ServiceState(**service) for service in values.pop('services'))
            more_models = tuple(values.pop('more_models', ()))
            placed = values.pop('placement', None)
            placement = RayPlacement(**placed) if placed else None
            return cls(state_dir=state_dir, services=services, more_models=more_models, placement=placement, **values)
        except (OSError, ValueError, TypeError, KeyError):
            return None

    @classmethod
    def create(
        cls,
        state_dir: Path,
        *,
        base_model: str,
        services: tuple[ServiceState, ...],
        http_address: str = '',
        ca: str = '',
        more_models: tuple[str, ...] = (),
    ) -> 'StackState':
        """Return the record of started services; the address is empty until the gateway is ready."""
        address = next((service.address for service in services if service.name == 'gateway'), '')
        return cls(
            state_dir=state_dir,
            address=address,
            base_model=base_model,
            services=services,
            start_time=time.time(),
            http_address=http_address,
            more_models=more_models,
            ca=ca,
        )

    def with_service(self, service: ServiceState) -> 'StackState':
        """Return the stack with `service`, which replaces a service of that name or is inserted before the gateway."""
        if any(item.name == service.name for item in self.services):
            services = tuple(service if item.name == service.name else item for item in self.services)
        else:
            services = (*self.services[:-1], service, *self.services[-1:])
        return replace(self, services=services)

    def without(self, services: Collection[ServiceState]) -> 'StackState':
        """Return the stack without the given services."""
        return replace(self, services=tuple(item for item in self.services if item not in services))

    def save(self) -> None:
        """Write the record atomically."""
        values = asdict(self)
        del values['state_dir']
        partial = self.state_dir / f'{_FILE}.partial'
        partial.write_text(json.dumps(values, indent=2) + '\n', encoding='utf-8')
        partial.replace(self.state_dir / _FILE)

    def delete(self) -> None:
        """Delete the record."""
        (self.state_dir / _FILE).unlink(missing_ok=True)

    def ended(self) -> tuple[ServiceState, ...]:
        """Return the services that have exited and are to be restarted."""
        return tuple(service for service in self.services if service.is_restarted and not service.is_running())

    def is_running(self) -> bool:
        """Return whether the stack is up and no service has to be restarted."""
        return bool(self.address) and not self.ended()

    def is_reachable(self) -> bool:
        """Return whether the stack is up and its gateway is running, even if other services are not."""
        gateways = (service for service in self.services if service.name == 'gateway')
        return bool(self.address) and any(service.is_running() for service in gateways)

    def read_api_key(self) -> str:
        """Return the stack's API key; empty if it cannot be read."""
        return read_secret(self.state_dir / _KEY_FILE)


def reachable(listen: str) -> str:
    """Return the address at which local processes reach a listener: on loopback if it listens on all interfaces."""
    host, _, port = listen.rpartition(':')
    return f'127.0.0.1:{port}' if port and host in ANY_HOST else listen


def key_path(state_dir: Path) -> Path:
    """Return the path of a stack's API key."""
    return state_dir / _KEY_FILE


def read_secret(path: Path) -> str:
    """Return the content of a secret file; empty if it cannot be read."""
    try:
        return path.read_text(encoding='utf-8').strip()
    except OSError:
        return ''
