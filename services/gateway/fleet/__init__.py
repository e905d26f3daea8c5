"""Fleet of samplers behind the gateway: registration, leases, load and routing."""

__all__: list[str] = []
