"""The verbs about the fleet, together."""

from dataclasses import dataclass

from services.gateway.fleet.drain import Drain
from services.gateway.fleet.lease import Lease
from services.gateway.fleet.list_replicas import ListReplicas
from services.gateway.fleet.register import Register
from services.gateway.fleet.watch_fleet import WatchFleet


@dataclass(frozen=True, kw_only=True)
class FleetVerbs:
    """What the fleet's service can do."""

    register: Register
    lease: Lease
    drain: Drain
    list_replicas: ListReplicas
    watch_fleet: WatchFleet
