"""Messages between this sampler and the gateways of its fleet."""

from dataclasses import dataclass
from datetime import timedelta

from services.sampler.domain.generation import EngineLoad
from services.sampler.domain.residency import ResidentVersion


@dataclass(frozen=True, kw_only=True)
class ReplicaReport:
    """Current state of this sampler."""

    replica_id: str
    """Identifies this process; a restart gets a new id."""
    address: str
    """Address at which gateways reach this sampler, `host:port`."""
    base_model: str
    engine: str
    load: EngineLoad
    resident: tuple[ResidentVersion, ...]
    """Resident versions, most recently used first."""
    is_draining: bool
    followed_run: str = ''
    """Full-parameter run that this sampler serves exclusively; empty for none."""


@dataclass(frozen=True, kw_only=True)
class Registration:
    """A gateway's answer to a sampler that joins its fleet."""

    lease_interval: timedelta
    """Longest time between two reports before the lease ends."""
    checkpoint_address: str
    """Address of the deployment's checkpoint service; empty if it has none."""


@dataclass(frozen=True, kw_only=True)
class LeaseRenewal:
    """A gateway's answer to one report."""

    lease_interval: timedelta
    """Longest time between two reports before the lease ends."""
    is_drain_requested: bool
    """Whether this sampler should finish its running requests and leave the fleet."""
    weight_source_address: str
    """Address of another sampler to take weights from; empty for the checkpoint service."""
