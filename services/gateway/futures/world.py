"""What the parts of futures share."""

from collections.abc import Callable
from dataclasses import dataclass

from services.gateway.futures.bulletin import Bulletin
from services.gateway.futures.peer_ports import Peers
from services.gateway.futures.persistence import Persistence
from services.gateway.futures.ports import FutureStore, PayloadStore
from services.gateway.futures.room import Room
from services.kit.byte_gate import ByteGate
from services.kit.caller import Caller
from services.kit.clock import Clock


@dataclass(frozen=True, kw_only=True)
class World:
    """The stores, and who knows of futures that are not finished."""

    store: FutureStore
    payloads: PayloadStore
    room: Room
    """Counts those that are not finished."""
    memory: ByteGate
    """Bounds the requests of those that run in lanes; of those that wait for their turns they are on the disk."""
    unordered_memory: ByteGate
    """Bounds those of no lane: some wait for a version that a lane has yet to make, and must not keep it out."""
    bulletin: Bulletin
    """Tells of those that are."""
    persistence: Persistence
    peers: Peers | None = None
    """Other gateways on the same database; None: there can be none."""
    caller: Callable[[], Caller]
    """Returns whom the call that is being served is for."""
    clock: Clock
