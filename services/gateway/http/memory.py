"""How much memory calls take while they are read and served: counted, bounded for each tenant, and given back."""

from dataclasses import dataclass

from services.kit.byte_gate import ByteGate, Hold

_WAIT_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class MemoryGates:
    """What calls take their memory from."""

    bodies: ByteGate
    """Bytes of bodies, from when they are announced until their calls are answered, and of large answers."""
    work: ByteGate
    """An estimate of what reading them into values takes, as long as the values are needed."""


def usual_gates() -> MemoryGates:
    """Return gates for as much as a small machine has."""
    return MemoryGates(
        bodies=ByteGate(tenant_bytes=256 << 20, total_bytes=1 << 30, wait_seconds=_WAIT_SECONDS),
        work=ByteGate(tenant_bytes=512 << 20, total_bytes=1 << 30, wait_seconds=_WAIT_SECONDS),
    )


class CallMemory:
    """What one call holds."""

    def __init__(self, gates: MemoryGates, tenant_id: str) -> None:
        """Hold nothing yet, for a tenant."""
        self.body: Hold = gates.bodies.hold(tenant_id)
        self.work: Hold = gates.work.hold(tenant_id)

    def release(self) -> None:
        """Give all back."""
        self.work.release()
        self.body.release()


def json_work_bytes(data: bytes) -> int:
    """Return about how much memory the values of a JSON document take, the more the more containers it has."""
    return 4 * len(data) + 64 * (data.count(b',') + data.count(b'[')) + 256 * data.count(b'{')


def message_work_bytes(data: bytes) -> int:
    """Return how much memory a protobuf message may take, whose every part may come as two bytes."""
    return 40 * len(data)
