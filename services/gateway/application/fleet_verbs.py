"""The verbs about the fleet, together."""

from dataclasses import dataclass

from services.gateway.application.drain import Drain
from services.gateway.application.lease import Lease
from services.gateway.application.list_replicas import ListReplicas
from services.gateway.application.register import Register
from services.gateway.application.watch_fleet import WatchFleet


@dataclass(frozen=True, kw_only=True)
class FleetVerbs:
    """What the fleet's service can do."""

    register: Register
    lease: Lease
    drain: Drain
    list_replicas: ListReplicas
    watch_fleet: WatchFleet
