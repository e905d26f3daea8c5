"""Messages between this sampler and the gateways of its fleet."""

from dataclasses import dataclass
from datetime import timedelta

from twinkle_services.sampler.domain.generation import EngineLoad
from twinkle_services.sampler.domain.residency import ResidentVersion


@dataclass(frozen=True, kw_only=True)
class ReplicaReport:
    """Current state of this sampler."""

    replica_id: str
    """Id of this process; a restarted sampler has a new id."""
    address: str
    """Address at which gateways reach this sampler, `host:port`."""
    base_model: str
    engine: str
    load: EngineLoad
    resident: tuple[ResidentVersion, ...]
    """Resident versions, most recently used first."""
    is_draining: bool
    followed_run: str = ''
    """Full-parameter run that this sampler serves exclusively; empty if it serves adapters."""


@dataclass(frozen=True, kw_only=True)
class Registration:
    """A gateway's response to a sampler that joins its fleet."""

    lease_interval: timedelta
    """Time without a report after which the lease expires."""
    checkpoint_address: str
    """Address of the deployment's checkpoint service; empty if the gateway does not provide one."""


@dataclass(frozen=True, kw_only=True)
class LeaseRenewal:
    """A gateway's response to one report."""

    lease_interval: timedelta
    """Time without a report after which the lease expires."""
    is_drain_requested: bool
    """Whether this sampler should finish its running requests and leave the fleet."""
    weight_source_address: str
    """Address of another sampler from which to fetch weights; empty for the checkpoint service."""
