"""What this sampler tells the fleet of itself, and what the fleet wants of it."""

from dataclasses import dataclass
from datetime import timedelta

from services.sampler.domain.generation import EngineLoad
from services.sampler.domain.residency import ResidentVersion


@dataclass(frozen=True, kw_only=True)
class ReplicaReport:
    """This sampler as it stands now."""

    replica_id: str
    """Chosen anew at each start."""
    address: str
    """Where gateways reach it, 'host:port'."""
    base_model: str
    engine: str
    load: EngineLoad
    resident: tuple[ResidentVersion, ...]
    """The most recently used first."""
    is_draining: bool
    followed_run: str = ''
    """The full-parameter run that it belongs to; empty: to everybody."""


@dataclass(frozen=True, kw_only=True)
class Welcome:
    """The answer to one who joins."""

    lease: timedelta
    """Report at least this often."""
    checkpoint_address: str
    """The deployment's checkpoint service; empty where it has none."""


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What a gateway wants of this sampler."""

    lease: timedelta
    """Report at least this often."""
    is_drain_requested: bool
    """Finish what runs and leave."""
    weight_source_address: str
    """Another sampler to take weights from; empty: the checkpoint service."""
