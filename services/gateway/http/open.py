"""Opens the HTTP listener of a gateway."""

from collections.abc import Iterable
from datetime import timedelta

from services.gateway.config import GatewayConfig
from services.gateway.http.call import MemoryGates, Route
from services.gateway.http.guard import Guard
from services.gateway.http.server import HttpOptions, HttpServer, make_app
from services.kit.byte_gate import ByteGate
from services.kit.rpc.auth import Authenticator


def open_http(config: GatewayConfig, *, authenticator: Authenticator, routes: Iterable[Route]) -> HttpServer | None:
    """Return the server of `routes`, not started; None if HTTP is not served."""
    if not config.http_listen:
        return None
    options = HttpOptions(
        listen=config.http_listen,
        drain=timedelta(seconds=config.drain_seconds),
        connections=config.http_connections,
        certificate=config.listeners()[0].tls,
    )
    budget = config.memory
    seconds = budget.wait.total_seconds()
    memory = MemoryGates(
        bodies=ByteGate(tenant_bytes=budget.bodies_per_tenant, total_bytes=budget.bodies, wait_seconds=seconds),
        work=ByteGate(tenant_bytes=budget.work_per_tenant, total_bytes=budget.work, wait_seconds=seconds),
    )
    guard = Guard(authenticator, memory=memory)
    return HttpServer(make_app(routes, guard), guard, options)
