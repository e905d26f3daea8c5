"""What is written down about a running stack, so that other programs find it and can stop it."""

import json
import os
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from twinkle_client.stack.processes import is_same_process

_FILE = 'stack.json'
_KEY_FILE = 'api_key'


def default_state_dir() -> Path:
    """Return `TWINKLE_STATE_DIR`, else `twinkle` in the user's folder for state."""
    if folder := os.environ.get('TWINKLE_STATE_DIR'):
        return Path(folder)
    base = os.environ.get('XDG_STATE_HOME')
    return (Path(base) if base else Path.home() / '.local' / 'state') / 'twinkle'


@dataclass(frozen=True, kw_only=True)
class ServiceState:
    """One service's process."""

    name: str
    pid: int
    start_mark: str
    """Tells this process from a later one with the same id."""
    address: str
    """Empty: whoever starts it still waits for it."""
    log_path: str
    base_model: str = ''
    """Which it holds; empty: none."""
    is_leaving: bool = False
    """It was told to finish what it has and to end."""

    @property
    def is_kept_up(self) -> bool:
        """Whether it is to be started again where it ends."""
        return bool(self.address) and not self.is_leaving

    def is_running(self) -> bool:
        """Whether this very process lives."""
        return is_same_process(self.pid, self.start_mark)


@dataclass(frozen=True, kw_only=True)
class StackState:
    """A stack, in the order its services were started."""

    state_dir: Path
    address: str
    """The gateway's, 'host:port'."""
    base_model: str
    services: tuple[ServiceState, ...]
    start_time: float
    http_address: str = ''
    """Where the gateway speaks HTTP; empty: nowhere."""
    more_models: tuple[str, ...] = ()
    """Further base models."""
    ca: str = ''
    """PEM file of the authority of its certificates; empty: it speaks no TLS."""

    @property
    def base_models(self) -> tuple[str, ...]:
        """All base models, in the order of their services."""
        return self.base_model, *self.more_models

    @property
    def url(self) -> str:
        """Where clients call it: the gateway's address, with https:// where it speaks TLS."""
        return f'https://{reachable(self.address)}' if self.ca and self.address else self.address

    @property
    def http_url(self) -> str:
        """Where HTTP clients call it; empty: nowhere."""
        scheme, address = ('https', reachable(self.http_address)) if self.ca else ('http', self.http_address)
        return f'{scheme}://{address}' if address else ''

    @classmethod
    def load(cls, state_dir: Path) -> 'StackState | None':
        """Return what is written down in `state_dir`; None where nothing (readable) is."""
        try:
            values = json.loads((state_dir / _FILE).read_text(encoding='utf-8'))
            services = tuple(ServiceState(**service) for service in values.pop('services'))
            more_models = tuple(values.pop('more_models', ()))
            return cls(state_dir=state_dir, services=services, more_models=more_models, **values)
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
        """Describe a stack of which these services were started; without the gateway it has no address."""
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
        """Return the stack with a service in the place of the one of its name, or before the gateway."""
        if any(item.name == service.name for item in self.services):
            services = tuple(service if item.name == service.name else item for item in self.services)
        else:
            services = (*self.services[:-1], service, *self.services[-1:])
        return replace(self, services=services)

    def without(self, services: Collection[ServiceState]) -> 'StackState':
        """Return the stack without some of its services."""
        return replace(self, services=tuple(item for item in self.services if item not in services))

    def save(self) -> None:
        """Write it down, replacing what was there at once."""
        values = asdict(self)
        del values['state_dir']
        partial = self.state_dir / f'{_FILE}.partial'
        partial.write_text(json.dumps(values, indent=2) + '\n', encoding='utf-8')
        partial.replace(self.state_dir / _FILE)

    def delete(self) -> None:
        """Forget it."""
        (self.state_dir / _FILE).unlink(missing_ok=True)

    def ended(self) -> tuple[ServiceState, ...]:
        """Return the services that are to be kept up and do not run."""
        return tuple(service for service in self.services if service.is_kept_up and not service.is_running())

    def is_running(self) -> bool:
        """Whether it came up whole and every service that is to be kept up runs."""
        return bool(self.address) and not self.ended()

    def is_reachable(self) -> bool:
        """Whether it came up and its gateway's process lives, whatever became of the services behind it."""
        gateways = (service for service in self.services if service.name == 'gateway')
        return bool(self.address) and any(service.is_running() for service in gateways)

    def read_api_key(self) -> str:
        """Return the stack's own API key; empty where it cannot be read."""
        return read_secret(self.state_dir / _KEY_FILE)


def reachable(listen: str) -> str:
    """Return where a process of this machine reaches what listens on every address; empty stays empty."""
    host, _, port = listen.rpartition(':')
    return f'127.0.0.1:{port}' if port and host in {'', '0.0.0.0', '[::]'} else listen  # noqa: S104 (compared, not bound)


def key_path(state_dir: Path) -> Path:
    """Return where a stack keeps its own API key."""
    return state_dir / _KEY_FILE


def read_secret(path: Path) -> str:
    """Return a secret's text, or the empty string."""
    try:
        return path.read_text(encoding='utf-8').strip()
    except OSError:
        return ''
