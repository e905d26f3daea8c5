"""Makes the gates that requests take their memory from."""

from services.gateway.config import MemoryConfig
from services.gateway.http.memory import MemoryGates
from services.kit.byte_gate import ByteGate


def memory_gates(options: MemoryConfig) -> MemoryGates:
    """Return what calls over HTTP take their memory from."""
    seconds = options.wait.total_seconds()
    return MemoryGates(
        bodies=ByteGate(tenant_bytes=options.bodies_per_tenant, total_bytes=options.bodies, wait_seconds=seconds),
        work=ByteGate(tenant_bytes=options.work_per_tenant, total_bytes=options.work, wait_seconds=seconds),
    )
