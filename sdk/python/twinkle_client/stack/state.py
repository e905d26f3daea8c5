"""What is written down about a running stack, so that other programs find it and can stop it."""

import json
import os
import time
from dataclasses import asdict, dataclass
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
    log_path: str

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

    @classmethod
    def load(cls, state_dir: Path) -> 'StackState | None':
        """Return what is written down in `state_dir`; None where nothing (readable) is."""
        try:
            values = json.loads((state_dir / _FILE).read_text(encoding='utf-8'))
            services = tuple(ServiceState(**service) for service in values.pop('services'))
            return cls(state_dir=state_dir, services=services, **values)
        except (OSError, ValueError, TypeError, KeyError):
            return None

    @classmethod
    def create(cls, state_dir: Path, *, base_model: str, services: tuple[ServiceState, ...]) -> 'StackState':
        """Describe a stack of which these services were started; without the gateway it has no address."""
        address = next((service.address for service in services if service.name == 'gateway'), '')
        return cls(
            state_dir=state_dir, address=address, base_model=base_model, services=services, start_time=time.time()
        )

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

    def is_running(self) -> bool:
        """Whether it came up whole and every service's process lives."""
        return bool(self.address) and all(service.is_running() for service in self.services)

    def read_api_key(self) -> str:
        """Return the stack's own API key; empty where it cannot be read."""
        return read_secret(self.state_dir / _KEY_FILE)


def key_path(state_dir: Path) -> Path:
    """Return where a stack keeps its own API key."""
    return state_dir / _KEY_FILE


def read_secret(path: Path) -> str:
    """Return a secret's text, or the empty string."""
    try:
        return path.read_text(encoding='utf-8').strip()
    except OSError:
        return ''
